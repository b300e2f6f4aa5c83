"""PPO balances a pole, as a program: how it learns, epoch by epoch, then what the program was at three levels.

python examples/context_cartpole.py --seed 2
python examples/context_cartpole.py --runtime ray --workers 2
"""

import argparse

from hybridflow import HybridFlowContext, compute_gae

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=40, help="at most; it ends when the pole stays up")
parser.add_argument("--steps", type=int, default=4096, help="of all environments together, in an epoch")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--runtime", choices=["local", "ray"], default="local")
parser.add_argument("--workers", type=int, default=0, help="processes for environments, with --runtime ray")
parser.add_argument("--save", help="a new folder for the run, which hybridflow eval and report read")


def main() -> None:
    given = parser.parse_args()
    with HybridFlowContext(given.runtime, workers=given.workers, seed=given.seed) as ctx:
        sampler = ctx.create_sampler({"env": "CartPole-v1"})
        critic = ctx.create_network("MLP", [256, 256])
        actor = ctx.create_network("MLP", [256, 256], policy_head=True)
        optimizer = ctx.create_optimizer("Adam", [actor, critic])
        for _ in range(given.epochs):
            experiences = sampler.collect(actor, steps=given.steps)
            advantages = compute_gae(experiences, critic)
            optimizer.update(actor, critic, experiences, advantages)
            evaluated = sampler.evaluate(actor, episodes=100)
            print(f"{ctx}  evaluated {evaluated.score:.0f} [{evaluated.low:.0f}, {evaluated.high:.0f}]", flush=True)
            if evaluated.score >= 475:
                break
        print(f"\n{ctx.graph}")
        if given.save:
            ctx.save(given.save)


if __name__ == "__main__":  # worker processes import this file
    main()
