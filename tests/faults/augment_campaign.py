"""An augmentation struck ten times at random moments: an actor, a node, the driver, the S3 server, each killed.

    python tests/faults/augment_campaign.py --seed 1 --rounds 10

As `campaign.py`, on its nodes and its storage, but one verb, one kill a round, and all four kinds in turn. Every round
must end, after running the same command again where needed, in the bytes of the undisturbed run and one manifest.
"""

import argparse
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import stale
from campaign import Campaign, Undisturbed, end
from campaign_faults import Fault, Faults, Target
from campaign_pipeline import Stage, fingerprint
from campaign_report import Round, summary
from campaign_world import World
from launch import BLOCK_ROWS, PART_BYTES

from lattqe.store import FeatureSet, FeatureWriter

KINDS = ("S3 server killed", "actor killed", "driver killed", "node killed")
ROWS, DIM, K = 3000, 16, 8
MIDDLE = 75  # percent of the requests, after which the actors have little left to do


def write_inputs(uri: str) -> None:
    """Features in about ten parts of several blocks each, their graph, and an untrained network."""
    import torch

    from lattqe.model import LAttQE, LAttQEConfig
    from lattqe.search.stored import publish_graph

    with FeatureWriter(f"{uri}/features", DIM, part_bytes=PART_BYTES) as writer:
        writer.append(np.random.default_rng(0).standard_normal((ROWS, DIM)), [f"r{row}" for row in range(ROWS)])
    publish_graph(FeatureSet.open(f"{uri}/features"), K, f"{uri}/graph")
    torch.manual_seed(0)
    LAttQE(LAttQEConfig(dim=DIM, heads=2, layers=1, max_k=K)).save(f"{uri}/model")


def write_reference(uri: str, to: str) -> list[list[str | int]]:
    """The undisturbed index, made in this process: the fingerprint that every round must end with."""
    from lattqe.augmentation.index import begin_index, build_index
    from lattqe.augmentation.recipe import Augmentation

    task = Augmentation(
        f"{uri}/features",
        f"{uri}/graph",
        to,
        "lattqe",
        K,
        {"model": f"{uri}/model", "dba": True},
        block_rows=BLOCK_ROWS,
    )
    pending = begin_index(task)
    build_index(task)
    pending.finish()
    return fingerprint(to)


class AugmentCampaign(Campaign):
    """Rounds of one kill each against `lattqe augment`; `kinds` are struck in turn, in an order that the seed draws."""

    def __init__(self, world: World, kinds: tuple[str, ...] = KINDS) -> None:
        stage = Stage(
            "augment",
            "index",
            lambda run: [
                f"{self.given}/features",
                "--model",
                f"{self.given}/model",
                "-k",
                str(K),
                "--neighbors",
                f"{self.given}/graph",
                "--workers",
                "2",
                "--cache",
                "~/cache",
            ],
        )
        super().__init__(world, (stage,), at_once=1)
        self.kinds, self.deck = kinds, list[str]()
        write_inputs(self.given)

    def expect(self, requests: int) -> None:
        """Take the reference of this process; kills strike within so many requests."""
        made = write_reference(self.given, f"{self.given}/undisturbed")
        self.undisturbed["index"] = Undisturbed(made, requests)

    def draw(self, stage: Stage, target: Target) -> list[list[Fault]]:
        """One kill, at a random request."""
        if not self.deck:
            self.deck = list(self.kinds)
            self.rng.shuffle(self.deck)
        at = self.rng.randint(1, MIDDLE * self.undisturbed["index"].requests // 100)
        return [[Fault(self.world, self.deck.pop(), at, random.Random(self.rng.random()))]]

    def both_at_once(self, first: int, second: int) -> Round:
        """One round in which a node dies at one request and the S3 server at another."""
        self.rng = random.Random(0)
        faults = [
            Fault(self.world, kind, at, self.rng) for kind, at in (("node killed", first), ("S3 server killed", second))
        ]
        with mock.patch.object(self, "draw", return_value=[faults]):
            return next(self.rounds(0))


def run_kills(seeds: list[int], rounds: int) -> list[Round]:
    """So many rounds of each seed, on a head and two worker nodes."""
    done: list[Round] = []
    stale.remove()
    with tempfile.TemporaryDirectory(prefix=stale.prefix()) as folder, mock.patch.dict(os.environ):
        world = World(Path(folder), nodes=2)
        try:
            campaign = AugmentCampaign(world)
            none = Faults([])
            campaign.expect(0)
            run = f"{campaign.given}/counted"
            world.proxy.fault = none.on_request
            world.start(["augment", *campaign.stages[0].words(None), "--to", run])
            if world.wait(300, lambda: None) != 0 or fingerprint(run) != campaign.undisturbed["index"].fingerprint:
                raise RuntimeError(f"augment fails by itself: {world.told()[-2000:]}")
            campaign.undisturbed["index"] = Undisturbed(campaign.undisturbed["index"].fingerprint, none.requests)
            print(f"undisturbed: {none.requests} requests to storage; {world.network.name}", flush=True)
            for seed in seeds:
                print(f"seed {seed}", flush=True)
                for result in itertools.islice(campaign.rounds(seed), rounds):
                    done.append(result)
                    print(result.line(), flush=True)
        finally:
            world.close()
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill what takes part in an augmentation, at random moments.")
    parser.add_argument("--seed", type=int, nargs="+", default=[int(time.time())], dest="seeds")
    parser.add_argument("--rounds", type=int, default=10, help="kills, for each seed")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, end)
    rounds = run_kills(**vars(arguments))
    print(summary(rounds))
    return 1 if any(each.problem for each in rounds) else 0


if __name__ == "__main__":
    sys.exit(main())
