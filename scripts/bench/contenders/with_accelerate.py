"""The usual loop with Hugging Face's accelerate; under torchrun it wraps the model for several processes."""

from __future__ import annotations

from accelerate import Accelerator, DataLoaderConfiguration

from scripts.bench.contenders.lenet import arguments, model_of, sgd_of, train


def main() -> None:
    """Train as accelerate's quick tour does. The loader is not prepared: it has only this process's share."""
    args = arguments()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=False))
    model = model_of(args)
    model, optimizer = accelerator.prepare(model, sgd_of(model))
    train(args, model, optimizer, accelerator.backward)
    accelerator.end_training()


if __name__ == "__main__":
    main()
