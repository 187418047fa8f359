"""The typed form of a sweep's configuration, how it is composed, and what a mistake in it is called.

Hydra composes `conf/sweep.yaml` and one file of each group over `SweepConfig`; whatever goes wrong on the way comes
out as one `UserError` that names the nearest valid choice, never as Hydra's own report.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from mla_var3 import paths, workload
from mla_var3.catalogue.registry import LANGUAGES
from mla_var3.errors import UserError, nearest
from mla_var3.files import invalid_yaml, read_yaml
from mla_var3.lab.profiling import DISABLED
from mla_var3.lab.profiling import MODES as PROFILES
from mla_var3.lab.profiling.points import ProfileConfig
from mla_var3.workload import DEFAULT, check_seed

GROUPS = ("experiment", "model", "kernels", "device", "bench", "profile")
MODES = ("measure", "compile")
TARGETS = ("device", "claimed")
ORDERS = ("listed", "even")
LAUNCHERS = ("local", "ray")

#: Hydra's own options: without a value, and with one in the next word.
_FLAGS = ("-m", "--multirun", "-r", "--run", "--resolve", "--hydra-help")
_VERBOSE = ("-v", "--verbose")
_CFG, _INFO = ("job", "hydra", "all"), ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_CHOICES = {"-c": _CFG, "--cfg": _CFG, "-i": _INFO, "--info": _INFO}
_VALUED = ("-c", "--cfg", "-i", "--info", "-p", "--package", "-cd", "--config-dir")


@dataclass
class ExperimentConfig:
    """Cells, as a list (`cells`), as a product or a list of products (`grid`), or drawn at random (`draw`).

    order: listed, or even: parts of equal work, and what is done of each by some time lies evenly over its cells.
    mode: measure (where there is a GPU), or compile, which never runs anything. targets: compile for the `device`, or
    for every architecture that a kernel claims. cpu: without a GPU, also run small problems on the CPU. recorded:
    without a GPU, show the records that the project ships beside what was compiled. workload: of its
    cells, where they do not name their own. draw: cells that the workload draws from the sweep's `seed`, or how many of
    several workloads, by their names. beside: two
    languages whose fastest versions are shown beside each other in every cell, with their ratio. boundaries: its cells
    are those that the dispatcher's rules lack records of, each with the versions that meet there. no_loop_spills:
    kernels, as `kernels.patterns` names them, that fail to compile where they spill registers in the loop of products.
    """

    name: str = "unnamed"
    description: str = ""
    mode: str = "measure"
    targets: str = "device"
    cells: list[Any] = field(default_factory=list)
    grid: Any = None
    cpu: bool = True
    recorded: bool = True
    workload: str = DEFAULT
    order: str = "listed"
    draw: Any = 0
    boundaries: bool = False
    beside: list[str] = field(default_factory=list)
    no_loop_spills: list[str] = field(default_factory=list)

    def draws(self) -> dict[str, int]:
        """How many cells each workload draws."""
        return dict(self.draw) if isinstance(self.draw, Mapping) else {self.workload: self.draw}


@dataclass
class ModelConfig:
    """Geometry for cells that do not name their own."""

    name: str = "unnamed"
    h: int = 128
    h_kv: int = 1
    k: int = 512
    p: int = 64
    d: int = 128


@dataclass
class KernelsConfig:
    """`language/design[_vN]` names; * and ? are wildcards. Without a slash a pattern is matched with the design.

    newest: of each language and design only the newest version that takes the cell. only: versions that stay out of
    other cells than these, each as `{kernels: PATTERN, FIELD: VALUE, ...}` with fields of a cell.
    """

    patterns: list[str] = field(default_factory=lambda: ["*"])
    exclude: list[str] = field(default_factory=list)
    only: list[Any] = field(default_factory=list)
    newest: bool = False


@dataclass
class DeviceConfig:
    """target: keys of devices.json, separated by commas, or auto: every kind of GPU that is here. fallback: what auto
    means without a GPU."""

    target: str = "auto"
    fallback: str = "h200"


@dataclass
class SweepConfig:
    """Everything a sweep is told; `conf/sweep.yaml` has a comment for each key.

    tilings: mappings of knobs, over `tiling`; every version is run in each of them, in turn, as a contender of its own.
    bench: `tune`, and fields of `mla_var3.measure.settings.BenchSettings`. part: "k/n", every n-th cell from the k-th.
    seed: of drawn cells. workload: a file or folder of workloads of flashinfer-bench, which are cells too. budget_s: no
    cell is begun after this many seconds of measuring; 0: all of them. launcher: local, or ray: on the Ray cluster that
    is here.
    """

    experiment: ExperimentConfig = field(default_factory=ExperimentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    bench: dict[str, Any] = field(default_factory=dict)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    problem: dict[str, Any] = field(default_factory=dict)
    tiling: dict[str, Any] = field(default_factory=dict)
    tilings: list[Any] = field(default_factory=list)
    seed: int = 0
    workload: str = ""
    part: str = "1/1"
    resume: bool = False
    budget_s: float = 0.0
    results_dir: str = "results"
    compile_dir: str = "out/results"
    jobs: int = 0
    launcher: str = "local"
    verbose: bool = False


# ---------------------------------------------------------------- composing
def register() -> None:
    """Puts the schema and one `device` choice for every key of devices.json where Hydra finds them."""
    from hydra.core.config_store import ConfigStore

    from mla_var3.device import Device

    store = ConfigStore.instance()
    store.store(name="sweep_schema", node=SweepConfig)
    for device in Device.all():
        store.store(group="device", name=device.key, node={"target": device.key})


def group_choices(group: str) -> list[str]:
    """Names that can follow `group=`."""
    names = set(paths.options(group))
    if group == "device":
        from mla_var3.device import Device

        names |= {device.key for device in Device.all()}
    return sorted(names)


def typed(cfg: Any) -> SweepConfig:
    """The dataclass form of a composed config, without Hydra's own node."""
    from omegaconf import OmegaConf

    config: SweepConfig = OmegaConf.to_object(cfg)  # type: ignore[assignment]
    for key, value, choices in (
        ("experiment.mode", config.experiment.mode, MODES),
        ("experiment.targets", config.experiment.targets, TARGETS),
        ("experiment.order", config.experiment.order, ORDERS),
        ("launcher", config.launcher, LAUNCHERS),
        ("profile.mode", config.profile.mode, (DISABLED, *PROFILES)),
    ):
        if value not in choices:
            raise UserError(f"{key} = {value!r} is unknown: {nearest(value, choices)}.")
    if config.experiment.beside and len(config.experiment.beside) != 2:
        raise UserError(f"experiment.beside names two languages, and has {len(config.experiment.beside)}.")
    for language in config.experiment.beside:
        if language not in LANGUAGES:
            raise UserError(f"experiment.beside: language {language!r} is unknown: {nearest(language, LANGUAGES)}.")
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", config.experiment.name):
        raise UserError(
            f"experiment.name = {config.experiment.name!r} names a file: use letters, digits, '_', '-' and '.'."
        )
    counts: dict[str, Any] = {"jobs": config.jobs, "budget_s": config.budget_s}
    for name, count in config.experiment.draws().items():
        if not isinstance(count, int) or isinstance(count, bool):
            raise UserError(f"experiment.draw = {count!r} is no number of cells of workload {name}: write draw: 24.")
        counts["experiment.draw"] = min(count, counts.get("experiment.draw", count))
    check_seed("seed =", config.seed)
    for key, number in counts.items():
        if number < 0:
            raise UserError(f"{key} = {number:g} is below 0: give at least 0, or leave it out.")
    for index, knobs in enumerate(config.tilings):
        if not isinstance(knobs, dict):
            raise UserError(
                f"tilings[{index}] = {knobs!r} is not a mapping of knobs: write 'tilings=[{{num_splits: 1}},{{}}]'."
            )
    kind = workload.get(config.experiment.workload).problem
    known = kind.fields()
    for name in config.problem:
        if name not in (*known, "batch"):
            raise UserError(f"there is no key 'problem.{name}': {nearest(str(name), known)}.")
    for index, rule in enumerate(config.kernels.only):
        if not isinstance(rule, dict) or not isinstance(rule.get("kernels"), str) or len(rule) < 2:
            raise UserError(
                f"kernels.only[{index}] = {rule!r} is no rule: write "
                "'kernels.only=[{kernels: peer/*, s: 1}]', a pattern and fields of a cell."
            )
        for name in rule:
            if name != "kernels" and name not in known:
                raise UserError(f"kernels.only[{index}] names {name!r}, no field of a cell: {nearest(name, known)}.")
    return config


def compose(overrides: Sequence[str]) -> SweepConfig:
    """One config from overrides, without running anything; mistakes are `UserError`s."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    words = prepare(overrides)
    _known_conf()
    with explained(words):
        register()
        GlobalHydra.instance().clear()
        with initialize_config_dir(config_dir=str(paths.conf_dir()), version_base="1.3"):
            return typed(hydra_compose("sweep", overrides=[*_search_path(), *words]))


def run_hydra(arguments: Sequence[str], task: Callable[[SweepConfig], None]) -> None:
    """Runs Hydra's own entry on `arguments` (overrides, and flags such as -m and --cfg job).

    `task` is called with the configuration of each job.
    """
    import hydra

    words = prepare(arguments)
    _known_conf()

    failed: list[Exception] = []

    def job(cfg: Any) -> None:
        # Hydra would print a line of its own about an exception; it is raised below instead, and ends a multirun.
        if failed:
            return
        try:
            with explained(words):
                config = typed(cfg)
            task(config)
        except Exception as error:
            failed.append(error)

    entry = hydra.main(config_path=str(paths.conf_dir()), config_name="sweep", version_base="1.3")(job)
    # Hydra reads sys.argv, and with this variable it raises its errors instead of printing them and exiting.
    argv, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["mla-var3 sweep", *_search_path(), *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        with explained(words):
            register()
            entry()
        if failed:
            raise failed[0]
    finally:
        sys.argv = argv
        if full is None:
            os.environ.pop("HYDRA_FULL_ERROR", None)
        else:
            os.environ["HYDRA_FULL_ERROR"] = full


def _search_path() -> list[str]:
    user = paths.user_conf_dir()
    return [] if user is None else [f"hydra.searchpath=[file://{user}]"]


def _known_conf() -> None:
    if not (paths.conf_dir() / "sweep.yaml").is_file():
        raise UserError(f"the configs are missing from {paths.conf_dir()}: reinstall mla-var3.")


def prepare(arguments: Sequence[str]) -> list[str]:
    """Overrides in Hydra's grammar, from the shorter forms that this command takes.

    `kernels=a/b,c/*` names versions directly (a sweep over them with -m); `tiling.x=1` needs no `++`; a word without
    `=` and a group's unknown choice are refused here, where the nearest choice is known.
    """
    multirun = any(word in ("-m", "--multirun") for word in arguments)
    words: list[str] = []
    flags: list[str] = []  # behind the words: Hydra's parser takes no override behind a flag
    previous = ""
    for word in arguments:
        if previous in _VALUED:
            if word not in _CHOICES.get(previous, (word,)):
                raise UserError(f"{previous} {word!r} is unknown: {nearest(word, _CHOICES[previous])}.")
            flags.append(word)
        elif word.startswith("-"):
            flag = word.split("=")[0]
            if flag not in (*_FLAGS, *_VALUED, *_VERBOSE):
                raise UserError(f"there is no option {flag}: {nearest(flag, (*_FLAGS, *_VALUED, *_VERBOSE))}.")
            (words if flag in _VERBOSE else flags).append("verbose=true" if flag in _VERBOSE else word)
        else:
            words += _prepare_word(word, multirun)
        previous = word
    return [*words, *flags]


def _prepare_word(word: str, multirun: bool) -> list[str]:
    if "=" not in word:
        if word.startswith("~"):
            return [word]
        if word in group_choices("experiment"):
            raise UserError(f"{word!r} is not KEY=VALUE: did you mean experiment={word}?")
        raise UserError(f"{word!r} is not KEY=VALUE: write for example experiment=quickstart problem.b=64.")
    key, value = word.split("=", 1)
    plain = key.lstrip("+")
    if plain.startswith(("tiling.", "bench.", "problem.")):
        return [f"++{plain}={value}"]
    top = re.split(r"[.@/]", plain.lstrip("~"))[0]
    known_keys = [f.name for f in fields(SweepConfig)]
    if top not in known_keys and top != "hydra":
        raise UserError(f"there is no key {top!r}: {nearest(top, known_keys)}.")
    if plain in GROUPS:
        choices = value.split(",") if multirun and not value.startswith("[") else [value]
        if plain == "kernels":
            return _kernels_word(value, choices)
        if plain == "device" and re.fullmatch(r"\[[^\[\]]+\]", value):
            choices = [key.strip() for key in value[1:-1].split(",")]
            word = f"device.target='{','.join(choices)}'"
        for choice in choices:
            known = group_choices(plain)
            if choice not in known and not re.search(r"[\[\]{}()$]", choice):
                raise UserError(f"{plain} {choice!r} is unknown: {nearest(choice, known)}.")
    return [word]


def _kernels_word(value: str, choices: list[str]) -> list[str]:
    from mla_var3.catalogue.registry import all_kernels

    # Versions that are named are meant, whatever the experiment's own choice leaves out.
    plain = ["kernels.newest=false", "kernels.exclude=[]", "kernels.only=[]"]
    groups = group_choices("kernels")
    if all(choice in groups for choice in choices):
        return [f"kernels={value}"]
    if value.startswith("["):
        return [f"kernels.patterns={value}", *plain]
    names = value.split(",")
    labels = [kernel.label for kernel in all_kernels()]
    for name in names:
        designs = {label.split("/")[1] for label in labels}
        if not re.search(r"[/*?]", name) and name not in designs and name not in groups:
            raise UserError(f"kernels {name!r} is unknown: {nearest(name, [*groups, *labels])}.")
    lists = [_patterns(name) if name in groups else [name] for name in names]
    if choices == [value]:
        lists = [[pattern for some in lists for pattern in some]]
    quoted = ("[" + ",".join(f"'{pattern}'" for pattern in some) + "]" for some in lists)
    return [f"kernels.patterns={','.join(quoted)}", *plain]


def _patterns(group: str) -> list[str]:
    """The patterns that `conf/kernels/<group>.yaml` holds."""
    said = read_yaml(paths.option_file("kernels", group))
    return [str(pattern) for pattern in said.get("patterns", [])]


# ---------------------------------------------------------------- explaining
@contextmanager
def explained(words: Iterable[str] = ()) -> Any:
    """Turns what Hydra, OmegaConf and the yaml reader raise into one `UserError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        sentence = explain(error)
        if sentence is None:
            raise
        raise UserError(sentence) from error


def explain(error: BaseException) -> str | None:
    """The one-line form of a configuration error; None for an error that is not about configuration."""
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    chain = list(_chain(error))
    if any(isinstance(item, UnicodeDecodeError) or _NO_MAPPING in str(item) for item in chain):
        return _unreadable(chain)
    for item in chain:
        if isinstance(item, YAMLError):
            return invalid_yaml(item)
    for item in chain:
        if isinstance(item, OverrideParseException):
            word = item.override.lstrip("+")
            return f"cannot read the override {word!r}: write KEY=VALUE, with quotes around odd characters."
        if isinstance(item, MissingConfigException):
            return _missing(item)
    for item in chain:
        if isinstance(item, OmegaConfBaseException) and item.key is not None:
            return _omega(item)
    for item in chain:
        if isinstance(item, HydraException | OmegaConfBaseException):
            return _first_line(str(item)) + " (mla-var3 sweep --help shows the keys)."
    return None


def _chain(error: BaseException | None) -> Iterable[BaseException]:
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__ or error.__context__
    return seen


#: What Hydra says of a file that is a list, and no more than the name of its group beside it.
_NO_MAPPING = "ValidationError raised while composing"


def _unreadable(chain: Sequence[BaseException]) -> str | None:
    """What is wrong with the file that could not be read, by its name, which Hydra keeps to itself."""
    named = next((m[1] for item in chain if (m := re.match(r"In '([^']+)'", str(item)))), "*/*")
    for folder in paths.conf_dirs():
        for path in sorted(folder.glob(f"{named}.yaml")):
            try:
                read_yaml(path)
            except UserError as error:
                return str(error)
    return None


def _missing(error: Any) -> str:
    wanted = str(error.missing_cfg_file or "")
    group, _, name = wanted.rpartition("/")
    if group in GROUPS:
        return f"{group} {name!r} is unknown: {nearest(name, group_choices(group))}."
    return f"there is no config {wanted!r}: {nearest(wanted, [*GROUPS])}."


def _omega(error: Any) -> str:
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, ReadonlyConfigError, ValidationError

    full, key = str(error.full_key or error.key), str(error.key)
    if isinstance(error, ValidationError) and "ListConfig" in str(error.msg):
        return f"{full} is a list: write for example '{full}=[{{num_splits: 1}},{{}}]'."
    if isinstance(error, ValidationError):
        return f"{full} has a wrong value: {_first_line(str(error.msg or error)).rstrip('.')}."
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        parent = error.parent_node
        keys = [str(k) for k in parent] if parent is not None else []
        keys = [k for k in keys if k != "hydra"]
        return f"there is no key {full!r}: {nearest(key, keys)}."
    if isinstance(error, ReadonlyConfigError):
        return f"{full} cannot be set."
    return f"{full}: {_first_line(str(error))}."


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "unknown error"
