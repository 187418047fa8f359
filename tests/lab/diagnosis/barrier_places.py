"""The smallest kernels with what compute-sanitizer reports of flash_mla: two warpgroups meet at a named barrier.

    compute-sanitizer --tool synccheck python3 tests/lab/diagnosis/barrier_places.py two
    compute-sanitizer --tool racecheck python3 tests/lab/diagnosis/barrier_places.py give

Each of 256 threads writes a word of shared memory, waits, and reads the word of its partner in the other warpgroup.

    one   both warpgroups run the same instructions: one place in the code waits at the barrier
    two   each has a copy of the code, so two places wait at the same barrier, one for each warpgroup
    none  two copies, and nobody waits: a real race
    give  two copies and two barriers; at each one warpgroup arrives (bar.arrive) and the other one waits
    pass  the first half of that, for one round: the first warpgroup writes and arrives, the other one waits and reads

With an mbarrier in place of the named one, as `pass`:

    stored  the first warpgroup writes, and arrives
    waited  it copies from global memory (cp.async), waits for its copies, and arrives
    copied  it copies, and the copies arrive by themselves (cp.async.mbarrier.arrive.noinc)
    ring    over rounds: it waits until what it wrote before has been read, writes, and arrives; the other one reads and
            arrives at a second mbarrier: every thread, or with `by=warp` a lane of each warp, behind bar.warp.sync with
            `by=synced`

Options: `rounds=N` repeats it; `peel=1` gives the last round a copy of its own; `again=same` takes one barrier both
before reading and after; `late=0|1` delays that warpgroup; `own=1` lets the first warpgroup meet at a barrier of its
own before it writes, `own=2` behind it as well; `more=exit` adds a third one that ends at once, `more=start` one that
lets the others start; `sync=barrier.sync` is the form that a diverged warp may use. It needs libcuda and nothing else:
the driver compiles the PTX. Ends with 1 when a thread read a wrong word.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence

GROUP = 128
NAME = "barrier_places"
FIRST, LATTER, BOTH = range(3)
#: How the first warpgroup hands its words over at an mbarrier.
HANDED = {
    "stored": ["{write}", "mbarrier.arrive.shared.b64 _, [%mbarrier];"],
    "waited": ["{copy}", "cp.async.wait_all;", "mbarrier.arrive.shared.b64 _, [%mbarrier];"],
    "copied": ["{copy}", "cp.async.mbarrier.arrive.noinc.shared.b64 [%mbarrier];"],
}
AT_MBARRIERS = ("ring", *HANDED)
ONE_WAY = ("pass", *AT_MBARRIERS)


def waits(who: int, mbarrier: str, parity: str) -> list[str]:
    """Until the phase of an mbarrier is over."""
    tried = f"mbarrier.try_wait.parity.shared.b64 %done, [{mbarrier}], {parity};"
    return [f"WAIT_{who}:", tried, f"@!%done bra WAIT_{who};"]


def ring(who: int, write: str, read: str, by: str) -> list[str]:
    """A round of `ring`. The first wait for an empty place is for the phase before the first, which is over."""
    mine, other = ("%mbarrier", "%empty") if who == FIRST else ("%empty", "%mbarrier")
    parity = f"and.b32 %parity, %round, 1; {'xor.b32 %parity, %parity, 1;' if who == FIRST else ''}"
    arrives = [f"mbarrier.arrive.shared.b64 _, [{mine}];"]
    if who == LATTER and by != "thread":
        arrives = ["bar.warp.sync 0xffffffff;"] if by == "synced" else []
        arrives += ["and.b32 %parity, %thread, 31; setp.eq.u32 %done, %parity, 0;"]
        arrives += [f"@%done mbarrier.arrive.shared.b64 _, [{mine}];"]
    return [parity, *waits(who, other, "%parity"), write if who == FIRST else read, *arrives]


def ptx(places: str, options: Mapping[str, str]) -> str:
    """The kernel: out[thread] = sum over the rounds of (partner's thread number + round)."""
    sync, everyone = options.get("sync", "bar.sync"), 2 * GROUP
    before = f"{sync} 5, {everyone};"
    after = before if options.get("again") == "same" else f"{sync} 6, {everyone};"

    def round_of(who: int) -> str:
        # A constant of its own keeps the compiler from joining the copies.
        mine, others = (0, 0) if who == BOTH else (3 + 4 * who, 7 - 4 * who)
        write = f"add.u32 %word, %thread, %round; xor.b32 %word, %word, {mine}; st.volatile.shared.u32 [%own], %word;"
        read = f"ld.volatile.shared.u32 %word, [%theirs]; xor.b32 %word, %word, {others}; add.u32 %sum, %sum, %word;"
        if places == "none":
            steps = [write, read]
        elif places == "ring":
            steps = ring(who, write, read, options.get("by", "thread"))
        elif places in HANDED and who == FIRST:
            steps = [
                step.format(write=write, copy="cp.async.ca.shared.global [%own], [%mine], 4;")
                for step in HANDED[places]
            ]
        elif places in HANDED:
            steps = [*waits(who, "%mbarrier", "0"), read]
        elif places == "pass":
            steps = [write, f"bar.arrive 5, {everyone};"] if who == FIRST else [f"bar.sync 5, {everyone};", read]
        elif places != "give":
            steps = [write, before, read, after]
        elif who == FIRST:
            steps = [write, f"bar.arrive 5, {everyone};", f"bar.sync 6, {everyone};", read]
        else:
            steps = [f"bar.sync 5, {everyone};", read, write, f"bar.arrive 6, {everyone};"]
        sleep = ["nanosleep.u32 20000;"] if options.get("late") == str(who) else []
        own = f"bar.sync 8, {GROUP};"
        if "own" in options and who == FIRST:
            steps = [own, write, own, *steps[1:]] if options["own"] == "2" else [own, *steps]
        return "\n    ".join([*sleep, *steps, "add.u32 %round, %round, 1;"])

    def part(who: int) -> str:
        peel = "peel" in options
        looped = "sub.u32 %last, %rounds, 1;" if peel else "mov.u32 %last, %rounds;"
        return f"""
    mov.u32 %round, 0;
    {looped}
    setp.ge.u32 %more, %round, %last;
    @%more bra END_{who};
AGAIN_{who}:
    .pragma "nounroll";
    {round_of(who)}
    setp.lt.u32 %more, %round, %last;
    @%more bra AGAIN_{who};
END_{who}:
    {round_of(who) if peel else ""}
    bra.uni END;"""

    starts = options.get("more") == "start"
    readers = GROUP if options.get("by", "thread") == "thread" else GROUP // 32
    begin = f"""mov.u32 %mbarrier, arrivals;
    add.u32 %empty, %mbarrier, 8;
    setp.eq.u32 %done, %thread, 0;
    @%done mbarrier.init.shared.b64 [%mbarrier], {GROUP};
    @%done mbarrier.init.shared.b64 [%empty], {readers};
    bar.sync 7, {everyone};"""
    code = part(BOTH) if places == "one" else f"@%second bra SECOND;{part(FIRST)}\nSECOND:{part(LATTER)}"
    return f"""
.version 7.8
.target sm_90
.address_size 64
.visible .entry {NAME}(.param .u64 out, .param .u32 count)
{{
    .reg .pred %second, %third, %more, %done;
    .reg .b32 %thread, %own, %theirs, %word, %sum, %round, %rounds, %last, %at, %base, %mbarrier, %empty, %parity;
    .reg .b64 %out, %place, %mine;
    .shared .align 4 .b32 box[{2 * GROUP}];
    .shared .align 8 .b64 arrivals[2];
    mov.u32 %thread, %tid.x;
    mov.u32 %sum, 0;
    ld.param.u32 %rounds, [count];
    setp.ge.u32 %third, %thread, {2 * GROUP};
    @!%third bra WORK;
    {f"bar.arrive 9, {3 * GROUP};" if starts else ""}
    ret;
WORK:
    {f"bar.sync 9, {3 * GROUP};" if starts else ""}
    setp.ge.u32 %second, %thread, {GROUP};
    mov.u32 %base, box;
    shl.b32 %at, %thread, 2;
    add.u32 %own, %base, %at;
    xor.b32 %at, %at, {4 * GROUP};
    add.u32 %theirs, %base, %at;
    ld.param.u64 %out, [out];
    mul.wide.u32 %place, %thread, 4;
    add.u64 %place, %out, %place;
    cvta.to.global.u64 %mine, %place;
    {begin if places in AT_MBARRIERS else ""}
    {code}
END:
    st.global.u32 [%place], %sum;
    ret;
}}
"""


def expected(places: str, rounds: int) -> list[int]:
    """By thread; where words go one way, the first warpgroup reads nothing."""
    readers = range(GROUP if places in ONE_WAY else 0, 2 * GROUP)
    return [sum((t ^ GROUP) + n for n in range(rounds)) if t in readers else 0 for t in range(2 * GROUP)]


def run(code: str, rounds: int, threads: int) -> list[int]:
    """What the threads of one block wrote."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        status = getattr(cuda, name)(*arguments)
        if status:
            raise SystemExit(f"{name}: error {status}")

    device, context, module, function = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    memory, count = ctypes.c_uint64(), ctypes.c_uint32(rounds)
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(code.encode()))
    call("cuModuleGetFunction", ctypes.byref(function), module, NAME.encode())
    found = (ctypes.c_uint32 * (2 * GROUP))(*(t ^ 3 for t in range(2 * GROUP)))  # what the first warpgroup copies
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(ctypes.sizeof(found)))
    call("cuMemcpyHtoD_v2", memory, found, ctypes.c_size_t(ctypes.sizeof(found)))
    pointers = (ctypes.c_void_p * 2)(ctypes.addressof(memory), ctypes.addressof(count))
    call("cuLaunchKernel", function, 1, 1, 1, threads, 1, 1, 0, None, pointers, None)
    call("cuCtxSynchronize")
    call("cuMemcpyDtoH_v2", found, memory, ctypes.c_size_t(ctypes.sizeof(found)))
    return list(found)


def main(words: Sequence[str]) -> int:
    places = next((word for word in words if "=" not in word), "two")
    options = dict(word.split("=", 1) for word in words if "=" in word)
    rounds = int(options.get("rounds", 1))
    code = ptx(places, options)
    if "ptx" in options:
        print(code)
        return 0
    right = run(code, rounds, (3 if "more" in options else 2) * GROUP) == expected(places, rounds)
    print("right" if right else "WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
