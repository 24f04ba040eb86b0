"""Targets: strategies as text and as JSON, and other short texts of the command line."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzzing import oracle
from fuzzing.case import Case, Target
from fuzzing.edits import Draw, pick, words
from fuzzing.hostile import LONG, WORDS
from fuzzing.oracle import tolerated
from helpers.galvatron_files import FILES
from vitpar import strategy
from vitpar.data import Labels, StreamSet, parse_policy
from vitpar.data.stream.urls import expand
from vitpar.launch import expand_hosts
from vitpar.models.families import model_config
from vitpar.planner.profile.cluster import find_cluster
from vitpar.strategy import parse, rank_grid, validate
from vitpar.strategy.galvatron import read_galvatron, to_galvatron
from vitpar.strategy.plan_json import plan_from_json, plan_text, plan_to_json, read_plan

MODELS = (model_config("vit_small_patch16_224"), model_config("vit_giant_patch14_224"))
SETTINGS: tuple[dict[str, Any], ...] = (
    *({}, {}, {"microbatches": 4}, {"microbatch_size": 2}, {"microbatches": 1 << 24}, {"microbatches": 10**18}),
    *({"schedule": name, "virtual_stages": 2} for name in ("interleaved1f1b", "zbvzerobubble", "gpipe")),
    *({"split": (5, 7)}, {"split": (10**12,)}, {"virtual_stages": 10**9}, {"microbatch_size": 10**18}),
)
USES = st.tuples(*map(st.sampled_from, (MODELS, (None, 1, 64, 1024, 1_000_003), SETTINGS, (1, 2, 8, 6, 4096))))
"""Model, batch size, other settings and number of ranks that a plan is used with."""
FIRST = (MODELS[0], 64, {}, 8)


def used(plan: strategy.Plan, model: Any, batch: int | None, settings: dict[str, Any], ranks: int) -> None:
    """Validate, resolve and convert a plan, as vitpar does before a run starts."""
    if plan_from_json(json.loads(plan_text(plan))) != plan or plan_from_json(plan_to_json(plan)) != plan:
        raise oracle.Wrong(f"'{plan!s:.200}' is another plan when it comes back from JSON")
    changed = tolerated(lambda: dataclasses.replace(plan, **settings)) or plan
    valid = tolerated(lambda: validate(changed, model, batch))
    if valid is not None:
        if validate(valid, model, batch) != valid:
            raise oracle.Wrong("validating a valid plan again changes it")
        tolerated(lambda: to_galvatron(valid, model.depth, batch or 64))
        if valid.is_uniform and valid.world_size <= 4096:
            tolerated(lambda: rank_grid(valid))
    resolved = tolerated(lambda: changed.resolve(ranks))
    if resolved is not None:
        tolerated(lambda: validate(resolved, model, batch))


RIGHT = (
    "dp1",
    "pp2xtp2xdp2",
    "tp2xdp",
    "dp2xfsdp4+ckpt",
    "pp1: 0-7=dp8, 8-11=fsdp8",
    "pp2: embed=fsdp4, 0-11=tp2xfsdp2, *=fsdp4+ckpt",
)


KIND = r"(dp|fsdp|tp)(1|2|3|4|16)(x(dp|fsdp|tp)(2|4)){0,2}(\+(ckpt|sp|2d|2\.5d@2|3d|zero1|zero2|offload)){0,2}"
LIKELY = rf"(pp(2|3|4|16)x)?{KIND}|pp(1|2|4): embed={KIND}, 0-[0-9]={KIND}, \*={KIND}"
STRATEGIES = st.sampled_from(RIGHT) | st.from_regex(LIKELY, fullmatch=True)
"""Strategies that are likely to parse."""


class Strategy(Target):
    """Strategy strings: parsed, written, validated, resolved."""

    def make(self, home: Path) -> None:
        long = ("dp2" * 500, "x".join(["dp2"] * 2_000), "x" * 70_000, "pp2: " + ", ".join(["*=dp2"] * 4_000), *LONG)
        self.triggers = [Case({}, argument=(text, FIRST), is_seed=True) for text in RIGHT]
        self.triggers += [Case({}, argument=(text, FIRST)) for text in (*long, *WORDS["words"]["strategy"])]

    def drawn(self, draw: Draw) -> Case:
        text = draw(STRATEGIES) if draw(st.booleans()) else words(draw, "strategy")
        if draw(st.booleans()):
            place = draw(st.integers(0, len(text)))
            text = pick(draw, (text[:place] + words(draw, "strategy") + text[place:], text.upper()))
        return Case({}, argument=(text, draw(USES)))

    def read(self, case: Case, place: Path) -> None:
        text, use = case.argument
        plan = parse(text)
        again = tolerated(lambda: parse(str(plan)))
        if again is None or (again, str(again)) != (plan, str(plan)):
            raise oracle.Wrong(f"'{plan!s:.200}', as it writes itself, is read as something else")
        used(plan, *use)


class Plan(Target):
    """Plans in JSON: plan.json of vitpar and strategies of Galvatron."""

    argument = USES

    def make(self, home: Path) -> None:
        replaced = dataclasses.replace
        plans = [parse(text) for text in (*RIGHT, "tp4+2.5d@1", "pp4xdp2+zero1")]
        plans.append(replaced(parse("pp2xdp2"), schedule="interleaved1f1b", virtual_stages=2, microbatches=8))
        plans.append(replaced(parse("pp4"), split=(3, 3, 3, 3), microbatch_size=2))
        self.ranks = [0] * len(plans) + [ranks for _, ranks in FILES.values()]
        self.seeds = [{"plan.json": plan_text(plan).encode()} for plan in plans]
        self.seeds += [{"galvatron.json": json.dumps(plan).encode()} for plan, _ in FILES.values()]

    def read(self, case: Case, place: Path) -> None:
        if ranks := self.ranks[case.seed]:
            plan = read_galvatron(place / "galvatron.json", ranks, None).plan
        else:
            plan = read_plan(place / "plan.json")
        used(plan, *(case.argument or FIRST))


def url(draw: Draw) -> str:
    """Return a URL of shards with braces. Some URLs run a command."""
    place, braces = pick(draw, WORDS["url"]["places"]), pick(draw, WORDS["url"]["braces"])
    return f"{place}train-{braces}{pick(draw, ('.tar', '', *LONG))}"


class Words(Target):
    """Label specs, augmentation policies, URLs with braces, names of clusters and models, lists of hosts."""

    kinds = ("label", "policy", "url", "cluster", "model", "hosts")

    def make(self, home: Path) -> None:
        urls = [place + braces for place in WORDS["url"]["places"] for braces in ("x.tar", "sh")]
        texts = [("url", text) for text in (*urls, *WORDS["url"]["braces"])]
        texts += [(kind, text) for kind in self.kinds for text in (*LONG, "x" * 10**6)]
        self.triggers = [Case({}, argument=text) for text in texts]

    def drawn(self, draw: Draw) -> Case:
        kind = pick(draw, self.kinds)
        return Case({}, argument=(kind, url(draw) if kind == "url" else words(draw, kind)))

    def read(self, case: Case, place: Path) -> None:
        kind, text = case.argument
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
                tolerated(find_cluster(text).hardware)
            case "hosts":
                if len(found := expand_hosts(text)) > 65_536:
                    raise oracle.Wrong(f"{len(found):,} hosts out of {len(text):,} characters")
            case _:
                model_config(text)
