"""What all recipes share: options, data, models, checkpoints, records, and what ranks do together.

loop.py is the loop over epochs and steps, job.py one rank's job in it; below them are these folders:

    world/       the ranks of a job: gather, broadcast, agree; their hosts, devices and network
    watch/       which rank the others wait for, and the report of a hang
    process/     one process: its rank, its signals, how it ends
    data/        data sets, built-in and your own
    models/      models fitted to the data, batch norm
    checkpoint/  checkpoints that are whole or absent
    record/      the files in runs/NAME and the terminal's output
    parallel/    code that several techniques share

Of these, only world/world.py and parallel/ use torch.distributed. The code that exchanges gradients is in the
recipes. Folders and files never import each other in a circle. Code that only one option needs is in a file of its
own, imported where the option is read: a default run loads none of these files.
"""
