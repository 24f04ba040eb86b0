"""Targets: strategies as text and JSON, and other short texts of the command line."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

from fuzzing import oracle
from fuzzing.attacks import words
from fuzzing.attacks.jsons import json_attack
from fuzzing.attacks.strategies import strategy
from fuzzing.target import Case, Files, FileTarget, Target, tolerated, whole_seed
from vitpar.data import Labels, StreamSet, parse_policy
from vitpar.data.stream.urls import expand
from vitpar.launch import expand_hosts
from vitpar.models import ViTConfig
from vitpar.models.families import model_config
from vitpar.planner.profile.cluster import find_cluster
from vitpar.strategy import Plan, parse, rank_grid, validate
from vitpar.strategy.galvatron import read_galvatron, to_galvatron
from vitpar.strategy.plan_json import plan_from_json, plan_text, plan_to_json, read_plan

MODELS = (model_config("vit_small_patch16_224"), model_config("vit_giant_patch14_224"))
WORLDS = (1, 2, 8, 6, 4096)
BATCHES = (None, 1, 64, 1024, 1_000_003)
SETTINGS: tuple[dict[str, Any], ...] = (
    *(
        {},
        {},
        {"microbatches": 4},
        {"microbatch_size": 2},
        {"microbatches": 1 << 24},
        {"microbatches": 10**18},
        {"virtual_stages": 2},
    ),
    *({"schedule": "interleaved1f1b", "virtual_stages": 2}, {"schedule": "zbvzerobubble", "virtual_stages": 2}),
    *(
        {"schedule": "gpipe"},
        {"split": (5, 7)},
        {"split": (10**12,)},
        {"virtual_stages": 10**9},
        {"microbatch_size": 10**18},
    ),
)


def used(plan: Plan, draw: random.Random) -> None:
    """Validate, resolve and convert a plan, as is done before a run starts."""
    model: ViTConfig = draw.choice(MODELS)
    batch = draw.choice(BATCHES)
    changed = tolerated(lambda: dataclasses.replace(plan, **draw.choice(SETTINGS))) or plan
    valid = tolerated(lambda: validate(changed, model, batch))
    if valid is not None:
        if validate(valid, model, batch) != valid:
            raise oracle.Wrong("validating a valid plan again changes it")
        tolerated(lambda: to_galvatron(valid, model.depth, batch or 64))
        if valid.is_uniform and valid.world_size <= 4096:
            tolerated(lambda: rank_grid(valid))
    resolved = tolerated(lambda: changed.resolve(draw.choice(WORLDS)))
    if resolved is not None:
        tolerated(lambda: validate(resolved, model, batch))


class TextTarget(Target):
    """Target whose cases are short texts."""

    def case_of(self, number: int, place: Path, text: Any) -> Case:
        """Return the case of a text."""
        return Case(
            number, place, 0, {"text": str(text).encode("utf-8", "surrogatepass")}, how=repr(text)[:150], told=text
        )


class StrategyText(TextTarget):
    """Strategy strings."""

    what = "strategy strings: parsed, written, validated, resolved"

    def __init__(self, home: Path) -> None:
        self._right = (
            "dp1",
            "pp2xtp2xdp2",
            "tp2xdp",
            "dp2xfsdp4+ckpt",
            "pp1: 0-7=dp8, 8-11=fsdp8",
            "pp2: embed=fsdp4, 0-11=tp2xfsdp2, *=fsdp4+ckpt",
        )

    def make(self, draw: random.Random, number: int, place: Path) -> Case:
        if (seed := whole_seed(number, len(self._right))) is not None:
            return dataclasses.replace(self.case_of(number, place, self._right[seed]), how="the seed itself")
        return self.case_of(number, place, strategy(draw))

    def read(self, case: Case) -> None:
        plan = parse(case.told)
        again = tolerated(lambda: parse(str(plan)))
        if again is None or (again, str(again)) != (plan, str(plan)):
            raise oracle.Wrong(f"'{plan!s:.200}', as it writes itself, is read as something else")
        if plan_from_json(json.loads(plan_text(plan))) != plan:
            raise oracle.Wrong(f"'{plan!s:.200}' is another plan when it comes back from JSON")
        used(plan, random.Random(case.number))


class Words(TextTarget):
    """Other short texts: labels, policies, URLs, clusters, hosts, models."""

    what = "label specs, augmentation policies, URLs with braces, names of clusters and models, lists of hosts"

    def __init__(self, home: Path) -> None:
        self._kinds = ("label", "policy", "url", "cluster", "hosts", "model")

    def make(self, draw: random.Random, number: int, place: Path) -> Case:
        kind = self._kinds[number % len(self._kinds)]
        text = getattr(words, kind)(draw)
        return dataclasses.replace(self.case_of(number, place, text), told=(kind, text))

    def read(self, case: Case) -> None:
        kind, text = case.told
        match kind:
            case "label":
                Labels.parse(text)
            case "policy":
                parse_policy(text)
            case "url":
                shards = expand(text)
                if len(shards) > 1_000_000:
                    raise oracle.Wrong(f"{len(shards):,} URLs out of {len(text):,} characters")
                StreamSet(shards, samples=1, num_classes=1, labels=Labels())
            case "cluster":
                cluster = find_cluster(text)
                tolerated(cluster.hardware)
            case "hosts":
                found = expand_hosts(text)
                if len(found) > 65_536:
                    raise oracle.Wrong(f"{len(found):,} hosts out of {len(text):,} characters")
            case _:
                model_config(text)


GALVATRON = {
    "pp_deg": 2,
    "tp_sizes_enc": "2,2,4,1",
    "tp_consecutive_flags": "1,1,1,0",
    "dp_types_enc": "0,1,0,1",
    "global_bsz": 64,
    "chunks": 4,
    "checkpoint": "0,1,0,1",
    "pp_division": "2,2",
    "pipeline_type": "pipedream_flush",
    "default_dp_type": "zero2",
    "vtp": 2,
    "embed_sdp": 1,
}


class PlanFile(FileTarget):
    """Plans in JSON, in the formats of vitpar and Galvatron."""

    what = "plan.json of vitpar and strategies of Galvatron"
    tokens = (
        b"null",
        b"-1",
        b"1e999",
        b"{}",
        b"[]",
        b'"dp"',
        b'"*"',
        b"999999999999",
        b'"0-11"',
        b"true",
        b",",
        b'"tp"',
        b"NaN",
    )

    def __init__(self, home: Path) -> None:
        texts = (
            "dp1",
            "pp2xtp2xdp2+ckpt",
            "tp4+2.5d@1",
            "pp2: embed=fsdp4, 0-11=tp2xfsdp2, *=fsdp4+ckpt",
            "pp4xdp2+zero1",
        )
        plans = [parse(text) for text in texts]
        plans[1] = dataclasses.replace(plans[1], schedule="interleaved1f1b", virtual_stages=2, microbatches=8)
        plans[4] = dataclasses.replace(plans[4], split=(3, 3, 3, 3), microbatch_size=2)
        self.seeds = [{"plan.json": plan_text(plan).encode()} for plan in plans]
        self.seeds += [{"galvatron.json": json.dumps(GALVATRON).encode()}]
        self.attacks = (_json,)

    def read(self, case: Case) -> None:
        draw = random.Random(case.number)
        if "galvatron.json" in self.seeds[case.seed]:
            ranks = 8 if case.untouched else draw.choice((8, 8, 8, 16, 1))
            found = read_galvatron(
                case.place / "galvatron.json", ranks, draw.choice((None, None, 4, 12)) if case.changed else 4
            )
            used(found.plan, draw)
            return
        plan = read_plan(case.place / "plan.json")
        if plan_from_json(plan_to_json(plan)) != plan:
            raise oracle.Wrong(f"'{plan!s:.200}' is another plan when it comes back from JSON")
        used(plan, draw)


def _json(draw: random.Random, files: Files) -> str:
    name = next(iter(files))
    content = files[name]
    assert isinstance(content, bytes)
    files[name], done = json_attack(draw, content)
    return done
