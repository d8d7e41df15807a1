"""Members of an ensemble one after the other, and all at once by ``torch.func.vmap``.

    python tests/benchmarks/ensemble.py --clock cpu

Bare loops without a Trainer: forward, backward and an Adam step of every member, each on rows of
its own. What is printed is how many steps of every member are done in a second.
"""

import argparse
import copy
from collections.abc import Callable, Iterable

import torch
from timing import CLOCKS, in_turn, machine, pairwise_ratios, spread
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.functional import cross_entropy

STEPS = 20


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 64, 10),
    )  # fmt: skip


def one_by_one(models: Iterable[nn.Module], inputs: Tensor, labels: Tensor) -> Callable[[], None]:
    members = [
        (model, torch.optim.Adam(model.parameters()), x, y)
        for model, x, y in zip(models, inputs, labels, strict=True)
    ]

    def run() -> None:
        for _ in range(STEPS):
            for model, optimizer, x, y in members:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()

    return run


def at_once(models: list[nn.Module], inputs: Tensor, labels: Tensor) -> Callable[[], None]:
    parameters, buffers = stack_module_state(models)
    model = copy.deepcopy(models[0]).to("meta")

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        output: Tensor = functional_call(model, (parameters, buffers), (x,))
        return cross_entropy(output, y)

    gradients = vmap(grad(loss))
    optimizer = torch.optim.Adam(list(parameters.values()))

    def run() -> None:
        for _ in range(STEPS):
            detached = {name: value.detach() for name, value in parameters.items()}
            for name, value in gradients(detached, inputs, labels).items():
                parameters[name].grad = value
            optimizer.step()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{machine()}; {args.members} members, {args.clock} time, {args.rounds} rounds")
    for make in (perceptron, convolutions):
        for batch in (32, 256):
            models = [make() for _ in range(args.members)]
            inputs = torch.randn(args.members, batch, 1, 8, 8)
            labels = torch.randint(10, (args.members, batch))
            runs = {
                "one by one": one_by_one([copy.deepcopy(m) for m in models], inputs, labels),
                "vmap": at_once(models, inputs, labels),
            }
            seconds = in_turn(runs, args.rounds, args.clock)
            rates = {
                name: spread([STEPS / s for s in taken], "{:.0f}")
                for name, taken in seconds.items()
            }
            ratio = spread(pairwise_ratios(seconds["one by one"], seconds["vmap"]))
            print(
                f"{make.__name__:13} batch {batch:4}  one by one {rates['one by one']:>18}"
                f"  vmap {rates['vmap']:>18} steps/s  ratio {ratio}"
            )


if __name__ == "__main__":
    main()
