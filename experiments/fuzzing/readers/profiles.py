"""Target: files of clusters and profiles, in the formats of vitpar and Galvatron."""

from pathlib import Path

from hypothesis import strategies as st

from fuzzing import oracle
from fuzzing.case import Case, Target, read_folder
from fuzzing.oracle import tolerated
from fuzzing.readers.checkpoints import TINY
from vitpar.planner.profile.cluster import find_cluster
from vitpar.planner.profile.estimate import estimate_model
from vitpar.planner.profile.galvatron import import_hardware, import_model
from vitpar.planner.profile.profiles import Hardware, ModelProfile

SEEDS = Path(__file__).parents[1] / "seeds"


class ProfileFiles(Target):
    """Clusters and profiles, one kind of file in each seed."""

    about = "clusters in TOML, profiles in JSON, profiles of Galvatron's"
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
                hardware = Hardware.read(place / "hardware.json")
                hardware.save(place / "again.json")
                if Hardware.read(place / "again.json") != hardware:
                    raise oracle.Wrong("a hardware profile reads back as another")
                for link in hardware.links[:20]:
                    link.seconds(1 << 20)
            case 2:
                model = ModelProfile.read(place / "model.json")
                model.save(place / "again.json")
                if ModelProfile.read(place / "again.json") != model:
                    raise oracle.Wrong("a model profile reads back as another")
                for layer in model.layers[:20]:
                    layer.forward.seconds(8)
            case _:
                import_hardware(place, 1, 8, 80 << 30, "H100")
                import_model(place, TINY, "bf16")
