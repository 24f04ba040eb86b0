"""Target: files of clusters and profiles, in the formats of vitpar and Galvatron."""

from pathlib import Path
from typing import TypeVar

from hypothesis import strategies as st

from fuzzing import oracle
from fuzzing.case import Case, Target, read_folder
from fuzzing.oracle import tolerated
from fuzzing.readers.checkpoints import TINY
from vitpar.planner.profile.cluster import find_cluster
from vitpar.planner.profile.estimate import estimate_model
from vitpar.planner.profile.galvatron import import_hardware, import_model
from vitpar.planner.profile.profiles import Hardware, ModelProfile

Record = TypeVar("Record", Hardware, ModelProfile)
SEEDS = Path(__file__).parents[1] / "seeds"


class Profile(Target):
    """Clusters in TOML, profiles in JSON, profiles of Galvatron: one kind of file in each seed."""

    argument = st.sampled_from((None, None, 1, 2, 8))

    def make(self, home: Path) -> None:
        self.seeds = [{"cluster.toml": (SEEDS / "cluster.toml").read_bytes()}]
        hardware = find_cluster(str(SEEDS / "cluster.toml")).hardware()
        hardware.save(home / "hardware.json")
        estimate_model(TINY, "bf16", hardware, ("tp1", "tp2")).save(home / "model.json")
        self.seeds += [{name: (home / name).read_bytes()} for name in ("hardware.json", "model.json")]
        self.seeds.append(read_folder(SEEDS / "galvatron"))

    def read(self, case: Case, place: Path) -> None:
        match case.seed:
            case 0:
                cluster = find_cluster(str(place / "cluster.toml"))
                tolerated(lambda: cluster.hardware(case.argument))
            case 1:
                for link in same_again(place / "hardware.json", Hardware).links[:20]:
                    link.seconds(1 << 20)
            case 2:
                for layer in same_again(place / "model.json", ModelProfile).layers[:20]:
                    layer.forward.seconds(8)
            case _:
                import_hardware(place, 1, 8, 80 << 30, "H100")
                import_model(place, TINY, "bf16")


def same_again(path: Path, profile_class: type[Record]) -> Record:
    """Return a profile that is written and read again."""
    profile = profile_class.read(path)
    profile.save(path.with_name("again.json"))
    if profile_class.read(path.with_name("again.json")) != profile:
        raise oracle.Wrong(f"a {profile_class.subject} profile reads back as another")
    return profile
