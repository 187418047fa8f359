"""CuTe's flash_attention: query tiles dealt once each, in the promised order; masks; Hopper code without spills.

The tile scheduler runs here as the kernels trace it, on a warp of greenlets (`device_on_cpu`).
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import random
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("greenlet", reason="greenlet is not installed")

from device_on_cpu import ON_CPU, cute_on_cpu, cutlass_on_cpu, meet, of_values, run_cta

from mla_var3.catalogue import registry
from mla_var3.device import Device
from mla_var3.workload.prefill import PrefillProblem

H200 = Device.get("h200")
KERNELS = [k for k in registry.all_kernels() if k.language == "cute-dsl" and k.design == "flash_attention"]
#: (d, p) of published models.
WIDTHS = [(128, 64), (128, 0), (256, 0), (128, 128), (64, 32)]
each_version = pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.label)


def widths_of(kernel: registry.KernelId) -> list[tuple[int, int]]:
    """Those of WIDTHS that a version takes."""
    plan = registry.get_plan(kernel)
    return [(d, p) for d, p in WIDTHS if plan(PrefillProblem(d=d, p=p), device=H200).supported()]


def module_of(kernel: registry.KernelId) -> Any:
    return inspect.getmodule(registry.get_plan(kernel))


def geometry_of(module: Any, h: int = 4, h_kv: int = 4) -> Any:
    """Of causal heads of 192 and 128 columns; what only some versions choose is as it is by default there."""
    wanted = {
        "h": h,
        "h_kv": h_kv,
        "dk": 192,
        "dv": 128,
        "causal": True,
        "tokens": 128,
        "ordered": False,
        "consumers": 2,
    }
    fields = inspect.signature(module.Geometry).parameters
    return module.Geometry(**{name: wanted.get(name, False) for name in fields})


def rows_of(module: Any) -> int:
    """Of a query tile."""
    geometry = geometry_of(module)
    return next((getattr(geometry, x) for x in ("cluster_rows", "rows") if hasattr(geometry, x)), None) or module.ROWS


def dealer(module: Any) -> str:
    """The function that deals query tiles: that of a warp of its own, or that of the producer."""
    return "schedule" if hasattr(module, "schedule") else "load"


def counts(module: Any) -> bool:
    """Whether CTAs take query tiles from a counter, and not by their own number."""
    return "counter" in inspect.signature(inspect.unwrap(getattr(module, dealer(module)))).parameters


def packed_of(geometry: Any) -> int:
    """Query heads that share a query tile."""
    return getattr(geometry, "packed", 1)


def named(function: Any, **given: Any) -> Any:
    """What a function returns that takes some of these: versions differ in what they hand over with a query tile."""
    wanted = inspect.signature(function).parameters
    return function(**{name: value for name, value in given.items() if name in wanted})


def in_wide_last_sections(module: Any) -> bool:
    """Whether sections are counted from the end, and the last one is wide enough for all CTAs."""
    return hasattr(module, "section_widths")


# ---------------------------------------------------------------- the scheduler on a CPU
def on_cpu(module: Any, **others: Any) -> SimpleNamespace:
    """The module's functions with the code that the kernel traces, on plain integers. others: replace some of them."""
    names = dict(vars(module))
    arch = vars(cute_on_cpu().arch) | {
        "sync_warp": lambda: meet("any", False),
        "atomic_add": lambda pointer, value: (pointer.load(), pointer.store(pointer.load() + value))[0],
        "mbarrier_wait": lambda *_: None,
    }
    names |= ON_CPU | {"cutlass": cutlass_on_cpu(), "cute": SimpleNamespace(**vars(cute_on_cpu()))}
    names["cute"].arch = SimpleNamespace(**arch)
    for name, value in vars(module).items():
        if callable(value) and getattr(value, "__module__", "") == module.__name__ and not inspect.isclass(value):
            code = inspect.unwrap(value)
            if isinstance(code, FunctionType):
                names[name] = FunctionType(code.__code__, names, name, code.__defaults__, code.__closure__)
    names |= others
    return SimpleNamespace(names=names, **{k: v for k, v in names.items() if k.isidentifier()})


def line_of(
    module: Any, pairs: Any, geometry: Any, blocks: int = 1, room: int = 1000, counter: Any = None, splits: int = 1,
    **others: Any,
) -> list[Any]:  # fmt: skip
    """The query tiles that CTAs name to their consumers, a list a CTA. room: keys of a kv head that fit in L2. Where
    there is no counter, CTA i of n gets every n-th. splits: of the keys of each, where the geometry has them."""
    told: list[list[Any]] = []

    def tell(_: Any, number: int, tile: Any, lane: int) -> None:
        if lane == 0 and tile.head >= 0 and (tile.rows > 0 or not counts(module)):
            assert number == len(told[-1])
            told[-1].append(tile)

    def load_tile(*given: Any) -> int | None:
        # Of versions that ask for the next query tile at the end of one: (inputs, storage, counter, lane, ...).
        if not late:
            return None
        return made.names["cute"].arch.atomic_add(given[2].iterator, 1) if given[3] == 0 else 0

    late = "counter" in inspect.signature(inspect.unwrap(module.load_tile)).parameters
    made = on_cpu(module, tell=tell, load_tile=load_tile, **others)
    offsets = [of_values([0, *itertools.accumulate(x)]) for x in zip(*pairs, strict=True)]
    inputs = SimpleNamespace(cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1])
    for block in range(blocks):
        told.append([])
        order = of_values([1 << 20] * module.SORTED)
        words = counter
        if counter is None:
            # Every n-th number: the counter stands n - 1 higher each time that it is asked.
            asked = itertools.count(1)
            made.names["cute"].arch.atomic_add = lambda *_, n=blocks, i=block, a=asked: n * (next(a) - 1) + i
            words = of_values([0, 0])
        storage = SimpleNamespace(order=SimpleNamespace(get_tensor=lambda _, found=order: found))
        storage.asked = SimpleNamespace(data_ptr=lambda: None)

        def work(storage: Any = storage, words: Any = words, block: int = block) -> None:
            from greenlet import getcurrent

            thread = getcurrent().thread
            if dealer(module) == "schedule":
                more = (splits, sum(s for s, _ in pairs)) if splits > 1 else ()
                made.names["schedule"](inputs, storage, words, block, blocks, room, thread, geometry, *more)
            elif counts(module):
                made.names["load"](inputs, storage, words, block, blocks, room, thread, None, geometry)
            else:
                made.names["load"](inputs, storage, block, blocks, 0, room, thread, None, geometry)

        run_cta(work)
    return told


def cut(module: Any, s: int) -> list[tuple[int, int]]:
    """(first query token, rows as a query tile says) of a request's query tiles, with a causal mask."""
    if hasattr(module, "rows_at"):
        made = on_cpu(module)
        return [named(made.rows_at, at=at, s=s, causal=True) for at in range(-(-s // module.ROWS))]
    return [(first, s - first) for first in range(0, s, rows_of(module))]


def wanted(pairs: Any, heads: int, module: Any, packed: int = 1) -> set[tuple[int, int, int]]:
    """(first query token, first head, rows as a query tile says) of all query tiles; packed: heads of one. Where heads
    are dealt together, a short query tile is that of both."""
    tiles, begin = set(), 0
    together = 2 if hasattr(module, "short_tiles") and heads % 2 == 0 else 1
    for s, _ in pairs:
        for first, rows in cut(module, s * packed):
            each = together if together > 1 and rows <= module.SHORT else packed
            tiles |= {(begin + first // packed, head, rows) for head in range(0, heads, each)}
        begin += s
    return tiles


def drawn(rng: random.Random, requests: int, longest: int = 700) -> list[tuple[int, int]]:
    """Lengths, some of them 0, some equal."""
    lengths = [0, 1, 127, 128, 129, rng.randrange(longest), rng.randrange(longest)]
    return [(rng.choice(lengths), rng.choice(lengths)) for _ in range(requests)]


BATCHES = [(1, 1), (3, 2), (31, 5), (33, 7), (64, 9), (128, 3), (129, 11), (200, 4)]


@each_version
@pytest.mark.parametrize(("requests", "blocks"), BATCHES)
def test_every_query_tile_is_dealt_once(kernel: registry.KernelId, requests: int, blocks: int) -> None:
    module, rng = module_of(kernel), random.Random(requests)
    pairs, geometry = drawn(rng, requests), geometry_of(module, 6, 3)
    dealt = line_of(module, pairs, geometry, blocks, room=rng.choice([1, 200, 1000, 1 << 20]))
    tiles = [tile for of_cta in dealt for tile in of_cta]
    found = [(tile.row, tile.head, tile.rows) for tile in tiles]
    assert len(found) == len(set(found)) and set(found) == wanted(pairs, 6, module, packed_of(geometry))
    begins = dict(zip(itertools.accumulate([0, *(s for s, _ in pairs)]), range(len(pairs)), strict=False))
    keys = [0, *itertools.accumulate(t for _, t in pairs)]
    for tile in tiles:
        begin, request = max((begin, i) for begin, i in begins.items() if begin <= tile.row)
        s, t = pairs[request]
        at = tile.row - begin
        assert (tile.key, tile.keys, tile.seen) == (keys[request], t, t - s + at + 1)


@each_version
def test_the_most_keys_come_first_and_heads_that_fit_in_l2_together(kernel: registry.KernelId) -> None:
    module = module_of(kernel)
    if dealer(module) == "schedule" and not in_wide_last_sections(module):
        pytest.skip("this version's sections have two query tiles for each cluster, wherever they fit")
    pairs = [(300, 300), (5, 900), (0, 2000), (700, 700), (300, 300), (129, 0)]
    (line,) = line_of(module, pairs, geometry_of(module, 9, 3), room=1400)  # three heads that no version packs
    assert [keys for keys, _ in itertools.groupby(tile.keys for tile in line)] == [900, 700, 300, 0]
    of_700 = [(tile.head, tile.rows) for tile in line if tile.keys == 700]
    of_300 = [(tile.key > 300, tile.head, tile.rows) for tile in line if tile.keys == 300]
    ends = [rows for _, rows in reversed(cut(module, 700))]
    # Two kv heads of 700 keys have room, six query heads: in these, the last query tile of each first.
    sections = [[0, 1, 2, 3, 4, 5], [6, 7, 8]]
    if in_wide_last_sections(module):
        sections = [[0, 1, 2], [3, 4, 5, 6, 7, 8]]  # what is left over comes first
    assert of_700 == [(head, x) for heads in sections for x in ends for head in heads]
    if in_wide_last_sections(module):
        # Two requests alike are dealt as one of 18 heads, of which twelve have room together.
        alike = [(request, head) for request in (False, True) for head in range(9)]
        ends = [rows for _, rows in reversed(cut(module, 300))]
        assert of_300 == [(*who, x) for some in (alike[:6], alike[6:]) for x in ends for who in some]
    else:
        requests = [request for request, _, _ in of_300]
        assert requests == sorted(requests), "equal requests stay as they come"


def test_query_tiles_end_where_they_need_the_fewest_kv_tiles() -> None:
    """A request is cut without gaps into as few query tiles as there can be, and with a causal mask no other way to cut
    it into so many needs fewer KV tiles of 128 keys."""
    for kernel in KERNELS:
        module = module_of(kernel)
        if not hasattr(module, "rows_at"):
            continue
        made, most = on_cpu(module), module.ROWS
        for s in (1, 64, 128, 129, 255, 256, 257, 384, 385, 512, 600, 1000, 1100):
            count = -(-s // most)
            for causal in (True, False):
                tiles = [named(made.rows_at, at=at, s=s, causal=causal) for at in range(count)]
                assert all(0 < rows <= most for _, rows in tiles)
                assert [first for first, _ in tiles] == [0, *(first + rows for first, rows in tiles[:-1])]
                assert sum(rows for _, rows in tiles) == s
            fewest = {0: 0}  # KV tiles, by query tokens that are cut so far
            for _ in range(count):
                fewest = {
                    end: min(n for begin, n in fewest.items() if begin < end <= begin + most) + -(-end // 128)
                    for end in range(1, s + 1)
                    if any(begin < end <= begin + most for begin in fewest)
                }
            tiles = [named(made.rows_at, at=at, s=s, causal=True) for at in range(count)]
            assert sum(-(-(first + rows) // 128) for first, rows in tiles) == fewest[s]


@each_version
def test_the_last_section_fills_all_ctas(kernel: registry.KernelId) -> None:
    """16 heads of 64 query tiles; L2 has room for the keys of two. Of 132 CTAs each has three query tiles of the last
    section, in the mean, and without a mask a section has one for each."""
    module = module_of(kernel)
    if not in_wide_last_sections(module):
        pytest.skip("this version has sections of one width")
    made, geometry = on_cpu(module), geometry_of(module, 16, 16)
    assert made.section_widths(8192, 64, 16, 2 * 8192, 132, geometry) == (2, 6)
    assert made.section_widths(8192, 64, 16, 9 * 8192, 132, geometry) == (9, 9)
    assert made.section_widths(128, 1, 16, 1, 132, geometry) == (1, 16)
    plain = dataclasses.replace(geometry, causal=False)
    assert made.section_widths(8192, 64, 16, 9 * 8192, 132, plain) == (3, 3)
    grouped = dataclasses.replace(geometry_of(module, 12, 4), causal=False)
    assert made.section_widths(8192, 64, 12, 9 * 8192, 132, grouped) == (3, 3)


def test_query_tiles_of_a_head_lie_side_by_side_behind_a_long_prefix() -> None:
    """128 heads of 384 query tokens behind 12,723 others, dealt to 66 clusters. In version 23 all query tiles of a head
    are among 66 that follow one another. Without the prefix the longest query tiles of all heads come first."""
    module = module_of(next(k for k in KERNELS if k.version == 23))
    made, geometry = on_cpu(module), geometry_of(module, 128, 128)
    assert made.section_widths(13_107, 2, 128, 3 * 13_107, 66, geometry) == (3, 33)
    assert made.section_widths(2047, 2, 128, 3 * 2047, 66, geometry) == (3, 99)
    assert made.section_widths(13_107, 2, 128, 50 * 13_107, 66, geometry) == (50, 50)

    def dealt(t: int) -> list[Any]:
        told = line_of(module, [(384, t)], geometry, blocks=66, room=50_000)
        return [told[i % 66][i // 66] for i in range(sum(len(x) for x in told))]

    places: dict[int, list[int]] = {}
    for i, tile in enumerate(dealt(13_107)):
        places.setdefault(tile.head // 2, []).append(i)
    assert len(places) == 64
    assert all(len(x) == 3 and max(x) - min(x) < 66 for x in places.values())
    lengths = [module.kv_tiles(tile, 128, True) for tile in dealt(384)]
    assert lengths == sorted(lengths, reverse=True)


def test_query_tiles_of_heads_that_share_keys() -> None:
    """With eight heads a kv head, 20 query tokens are 160 rows, a query tile of 128 and one of 32, of which the second
    consumer has none; unpacked they are eight query tiles of 20 rows."""
    for kernel in KERNELS:
        module = module_of(kernel)
        geometry = geometry_of(module, 16, 2)
        if packed_of(geometry) == 1:
            continue
        (line,) = line_of(module, [(20, 700)], geometry)
        assert [(x.row, x.head, x.rows, x.seen) for x in line] == [
            (16, 0, 32, 697), (16, 8, 32, 697), (0, 0, 160, 681), (0, 8, 160, 681)
        ]  # fmt: skip
        made = on_cpu(module)
        assert [made.working(x, geometry) for x in line] == [1, 1, 2, 2]
        assert [made.place_of_row(line[1], row, geometry) for row in (0, 7, 8, 31)] == [
            (8, 16), (15, 16), (8, 17), (15, 19)
        ]  # fmt: skip


def test_a_short_query_tile_is_that_of_two_heads() -> None:
    """Of 300 query tokens the first 128 rows of heads 2i and 2i + 1 are one query tile, of which each CTA has a head.
    All consumers together have each row of it once, and see what a query token sees; so of the other query tile."""
    for kernel in KERNELS:
        module = module_of(kernel)
        if not hasattr(module, "own_rows"):
            continue
        made = on_cpu(module)
        for geometry, short in ((geometry_of(module, 4, 4), [0, 2]), (geometry_of(module, 3, 3), [0, 1, 2])):
            (line,) = line_of(module, [(300, 700)], geometry)
            assert sorted(x.head for x in line if x.rows <= module.SHORT) == short
            found = []
            for tile, rank, me in itertools.product(line, range(module.CTAS), range(2)):
                mine, first = made.own_rows(tile, rank, me, geometry.together), module.block_of(rank, me) * module.HALF
                for row in range(first, min(first + module.HALF, mine.rows)):
                    found.append((mine.head, mine.place + row))
                    assert mine.seen + row == 401 + mine.place + row
                assert made.kv_tiles(mine, 128, True) == made.kv_tiles(tile, 128, True)
            assert sorted(found) == [(head, row) for head in range(geometry.h) for row in range(300)]


def test_a_few_query_tokens_behind_a_long_prefix_come_first() -> None:
    """Where requests are dealt by the keys that a query token sees in the mean, one of 5 tokens behind 600 comes ahead
    of a prompt of 700."""
    for kernel in KERNELS:
        module = module_of(kernel)
        if hasattr(module, "mean_keys"):
            (line,) = line_of(module, [(700, 700), (5, 605), (0, 900)], geometry_of(module))
            assert [keys for keys, _ in itertools.groupby(tile.keys for tile in line)] == [605, 700]


@each_version
def test_a_launch_leaves_the_counter_as_it_found_it(kernel: registry.KernelId) -> None:
    module, counter = module_of(kernel), of_values([0, 0])
    if not counts(module):
        pytest.skip("this version has no counter")
    for pairs in ([(300, 300), (1, 5)], [(0, 7)], drawn(random.Random(5), 40)):
        dealt = line_of(module, pairs, geometry_of(module), blocks=5, counter=counter)
        assert {(x.row, x.head, x.rows) for of_cta in dealt for x in of_cta} == wanted(pairs, 4, module)
        assert counter.values() == [0, 0]


@each_version
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("query_tiles", lambda s, *_: max(s, 0) // 128),
        ("place_of", lambda index, tiles, *widths: (index % tiles, index // tiles % (widths[-1] - 1))),
    ],
)
def test_a_planted_fault_is_found(kernel: registry.KernelId, name: str, other: Any) -> None:
    module = module_of(kernel)
    pairs = [(300, 300), (5, 900)]
    dealt = line_of(module, pairs, geometry_of(module), 3, **{name: other})
    assert {(x.row, x.head, x.rows) for of_cta in dealt for x in of_cta} != wanted(pairs, 4, module)


@each_version
def test_ctas_of_a_cluster_have_as_much_to_do_on_the_diagonal(kernel: registry.KernelId) -> None:
    """The blocks of 64 rows of a cluster are dealt once each, and each CTA's see as many keys."""
    module = module_of(kernel)
    if not hasattr(module, "block_of"):
        pytest.skip("this version has no query tile of two CTAs")
    blocks = [[module.block_of(rank, me) for me in range(2)] for rank in range(module.CTAS)]
    assert sorted(block for of_cta in blocks for block in of_cta) == list(range(module.ROWS // module.HALF))
    assert len({sum(of_cta) for of_cta in blocks}) == 1


# ---------------------------------------------------------------- masks
@each_version
@pytest.mark.parametrize("tokens", [64, 80, 96, 128])
def test_kv_tiles_are_those_that_rows_see(kernel: registry.KernelId, tokens: int) -> None:
    module = module_of(kernel)
    made, rng, size = on_cpu(module), random.Random(tokens), rows_of(module)
    for _ in range(300):
        s, t = rng.randrange(1, 600), rng.randrange(600)
        for causal, h_kv in itertools.product((True, False), (4, 1)):
            geometry = dataclasses.replace(geometry_of(module, 4, h_kv), tokens=tokens, causal=causal)
            packed = packed_of(geometry)
            given = {"tokens": tokens, "causal": causal, "rows": size, "geometry": geometry}
            at = rng.randrange(0, s * packed, size) // size
            tile = named(made.tile_of, place=(at, 0), first_q=0, s=s, first_k=0, t=t, **given)
            rows = range(min(tile.rows, size, (s - tile.row) * packed))
            sees = [min(max(t - s + tile.row + row // packed + 1, 0), t) if causal else t for row in rows]
            given |= {"tile": tile}
            count = named(made.kv_tiles, **given)
            assert count == -(-max(sees) // tokens)
            for first in (0, module.HALF):
                given |= {"count": count, "first_row": first}
                if causal and first < len(rows):
                    assert named(made.whole_tiles, **given) == min(sees[first:]) // tokens
                if "last_keys" in made.names and count and first < len(rows):
                    # A bound for the half of the rows: those that lie behind the request may see more.
                    last = named(made.last_keys, **given)
                    most = max(sees[first : first + module.HALF]) - (count - 1) * tokens
                    assert max(last, 0) >= max(most, 0)
                    assert max(last, 0) == max(most, 0) or first + module.HALF > len(rows)


# ---------------------------------------------------------------- splits of keys
def splitting_versions() -> list[Any]:
    found = [module for kernel in KERNELS if hasattr(module := module_of(kernel), "split_of")]
    assert found
    return found


def seen_by_rows(made: Any, tile: Any, causal: bool) -> list[set[int]]:
    """The keys of k and v that each row of a query tile sees."""
    ends = [min(tile.keys, tile.seen + row) if causal else tile.keys for row in range(tile.rows)]
    return [set(range(tile.key, tile.key + max(end, 0))) for end in ends]


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8])
def test_splits_of_a_query_tile_share_its_keys(splits: int) -> None:
    """Each row sees each of its keys in one split, and splits differ by at most one KV tile."""
    for module in splitting_versions():
        made, rng, tokens = on_cpu(module), random.Random(splits), 128
        for _ in range(200):
            s, t = rng.randrange(1, 700), rng.choice([0, rng.randrange(1500)])
            at, causal = rng.randrange(-(-s // module.ROWS)), rng.random() < 0.7
            whole = made.tile_of((at, 3), 50, s, 100, t, causal)
            found = [made.split_of(whole, i, splits, 9000, tokens, causal) for i in range(splits)]
            counts_of = [made.kv_tiles(tile, tokens, causal) for tile in found]
            assert sum(counts_of) == made.kv_tiles(whole, tokens, causal) and max(counts_of) - min(counts_of) <= 1
            wanted = seen_by_rows(made, whole, causal)
            parts = [seen_by_rows(made, tile, causal) for tile in found]
            for row, keys in enumerate(wanted):
                assert sum(len(part[row]) for part in parts) == len(keys)
                assert set().union(*(part[row] for part in parts)) == keys
            for i, tile in enumerate(found):
                assert (tile.row, tile.rows, tile.head) == (whole.row, whole.rows, whole.head)
                assert tile.place == whole.row + 9000 * i
                # Rows of V that are no key of the request are zeroed in the last split only.
                assert counts_of[i] * tokens <= tile.keys or not counts_of[i] or tile.key + tile.keys == 100 + t


@pytest.mark.parametrize(("requests", "splits"), [(1, 2), (1, 8), (5, 3), (40, 2)])
def test_every_split_of_every_query_tile_is_dealt_once(requests: int, splits: int) -> None:
    for module in splitting_versions():
        pairs, geometry = drawn(random.Random(requests), requests), geometry_of(module, 4, 2).splitting
        rows = sum(s for s, _ in pairs)
        dealt = line_of(module, pairs, geometry, blocks=7, splits=splits)
        named = [(x.row, x.head, x.rows, x.place) for of_cta in dealt for x in of_cta]
        want = {(*x, x[0] + rows * i) for x in wanted(pairs, 4, module) for i in range(splits)}
        assert len(named) == len(set(named)) and set(named) == want


def test_keys_are_split_where_query_tiles_are_few() -> None:
    """On an H200, by one request's query tokens, keys and heads."""
    chosen = {
        (512, 4608, 16): 2, (512, 16896, 16): 2, (512, 131584, 16): 2, (384, 16768, 16): 2, (256, 16640, 16): 4,
        (128, 16512, 16): 4, (2048, 6144, 16): 1, (2048, 18432, 16): 1, (8192, 73728, 16): 1, (512, 16896, 128): 1,
        (64, 16448, 128): 1, (512, 512, 16): 1, (4096, 4096, 16): 1, (1, 100000, 2): 8,
    }  # fmt: skip
    for module in splitting_versions():
        made = on_cpu(module)
        found = {cell: made.splits_for(cell[0], cell[1], 1, cell[2], 66, 128) for cell in chosen}
        assert found == chosen
        for requests in (1, 8, 1000):
            for n in (1, 4096, 1 << 20):
                splits = made.splits_for(n, n, requests, 16, 66, 128)
                assert splits == 1 or splits * n * 16 <= module.MOST_ROWS


# ---------------------------------------------------------------- what is taken, and how
@each_version
def test_kv_tiles_fit_in_shared_memory_and_registers(kernel: registry.KernelId) -> None:
    module = module_of(kernel)
    found = {(d + p, d): module.kv_tile_of(d + p, d) for d, p in widths_of(kernel)}
    wanted = {(192, 128): 128, (128, 128): 128, (256, 256): 80, (256, 128): 96, (96, 64): 128}
    assert (192, 128) in found and found == {widths: wanted[widths] for widths in found}
    more = (2,) if "consumers" in inspect.signature(module.smem_bytes).parameters else ()
    for (dk, dv), tokens in found.items():
        assert module.smem_bytes(dk, dv, tokens, *more) <= H200.smem_per_block
        problem = PrefillProblem(b=1, s=64, h=2, d=dv, p=dk - dv)
        assert registry.get_plan(kernel)(problem, device=H200).tiling.validate(problem, H200)


def test_narrow_keys_have_three_consumers_and_wide_results_a_lazy_maximum() -> None:
    (kernel,) = (k for k in KERNELS if k.version == 12)
    chosen = {}
    for d, p in WIDTHS:
        problem = PrefillProblem(b=1, s=64, h=2, d=d, p=p, causal=True)
        geometry = registry.get_plan(kernel)(problem, device=H200).tiling.geometry(problem)
        chosen[d + p, d] = geometry.tokens, geometry.consumers, geometry.lazy
    assert chosen == {
        (192, 128): (128, 2, False),
        (128, 128): (128, 2, False),
        (256, 256): (80, 2, True),
        (256, 128): (96, 2, False),
        (96, 64): (128, 3, False),
    }


@each_version
def test_refusals_say_why(kernel: registry.KernelId) -> None:
    plan = registry.get_plan(kernel)
    some_widths = len(widths_of(kernel)) < len(WIDTHS)
    of_widths = [
        ({"d": 96, "p": 0}, "values of d = 96 columns must be 64, 128, 192 or 256"),
        ({"d": 128, "p": 8}, "keys of d + p = 136 columns must be a multiple of 16, 256 at most"),
        ({"d": 256, "p": 64}, "keys of d + p = 320 columns"),
    ]
    if some_widths:
        of_widths = [({"d": 256, "p": 0}, "256 columns of keys and 256 of values are not this version's")]
    for fields, words in (
        *of_widths,
        ({"b": 600, "s": 1 << 22}, "tokens of q or k"),
        ({"b": 64, "s": 1 << 20}, "lse is (128, 67,108,864)"),
        ({"dtype": "fp32"}, "fp32"),
    ):
        verdict = plan(PrefillProblem(**fields), device=H200).supported()
        assert not verdict and words in verdict.reason
    problem = PrefillProblem() if some_widths else PrefillProblem(d=256, p=0)
    refused = [({"kv_tile": 100}, "not a multiple of 16"), ({"kv_tile": 144}, "shared memory for q")]
    if "consumers" in inspect.signature(plan.tiling_type).parameters:
        refused.append(({"consumers": 4}, "consumers = 4 is not 2 or 3"))
    for knobs, words in refused:
        verdict = plan.tiling_type(**knobs).validate(problem, H200)
        assert not verdict and words in verdict.reason


def test_no_query_needs_no_launch() -> None:
    for kernel in KERNELS:
        problem = PrefillProblem(b=2, h=2, lengths=[[0, 5], [0, 0]])
        plan = registry.get_plan(kernel)(problem, device=H200)
        bound = plan.plan(*plan.prepare_inputs("cpu"))
        bound.launch()
        assert [tuple(x.shape) for x in bound.output_tensors] == [(0, 2, 128), (2, 0)]


# ---------------------------------------------------------------- what the compiler makes of it
#: One compile of each version takes seconds: that of most registers, and that of most shared memory.
COMPILED = [(kernel, width) for kernel in KERNELS for width in ((128, 64), (256, 0)) if width in widths_of(kernel)]


@pytest.mark.parametrize(("kernel", "width"), COMPILED, ids=lambda x: getattr(x, "label", None) or "{}_{}".format(*x))
def test_products_overlap_with_the_softmax(kernel: registry.KernelId, width: tuple[int, int]) -> None:
    d, p = width
    problem = PrefillProblem(b=1, s=4096, h=8, d=d, p=p, causal=True)
    made = registry.get_plan(kernel)(problem, device=H200).plan_empty().compile(None, H200)
    taken, count = made.resources, made.resources.instructions
    assert made.warnings == ()
    assert taken.spill_bytes == 0 and count["STL"] == 0 and count["LDL"] == 0
    assert taken.ctas_per_sm == 1 and count["USETMAXREG"] == 2
    # ptxas waits for every product where it lacks registers: there are then as many waits as products.
    assert count["WARPGROUP"] <= count["HGMMA"] // 3
