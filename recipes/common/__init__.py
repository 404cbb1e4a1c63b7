"""What all recipes share: options, data, models, checkpoints, records, and what ranks do together.

loop.py is the loop over epochs and steps, job.py one rank's job in it; below them are the rooms:

    world/       what ranks do together: gather, broadcast, agree; the hosts, devices and network they have
    watch/       which rank the others wait for, and the report when it does not come
    process/     a process of its own: its rank, its signals, how it ends
    data/        data sets, samples of your own
    models/      models fitted to the data, batch norm
    checkpoint/  files that are whole or absent
    record/      what is written to runs/NAME, and shown
    parallel/    what several techniques share

Of these, only world/world.py and parallel/ use torch.distributed: gathers, broadcasts and barriers on the CPU.
What exchanges gradients is in the recipes. A room imports from lower rooms, never in a circle. What only an option
needs is a file of its own, imported where the option is read: a default run loads none of these.
"""
