"""Where a version does not run: what an entry says of it, held against the version's own requirement and its records.

    skips: {others: wgmma needs sm_90a}                # every other architecture of devices.json
    skips: {a100: "...", sm_120a: "..."}               # a device, an architecture

An entry owes a reason for every device that `devices.json` knows (those that are measured are among them) and that the
version cannot run on, and for every record that says "skipped" for that reason.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from importlib import util
from typing import TYPE_CHECKING

from mla_var3.catalogue import registry
from mla_var3.errors import UserError, nearest
from mla_var3.lab.devlog.segments import Finding
from mla_var3.lab.devlog.values import Record

if TYPE_CHECKING:
    from mla_var3.catalogue.registry import KernelId
    from mla_var3.device import Device, Requirement
    from mla_var3.lab.devlog.entry import Entry

FIELD = "skips"
OTHERS = "others"
#: How `Device.can_run` ends a sentence about an architecture.
_ARCH = re.compile(r"; this is (sm_\w+)$")


def requirement_of(kernel: KernelId) -> tuple[Requirement | None, str]:
    """(what the version needs of a device, why that cannot be read here). Imports the version."""
    reason = registry.missing(kernel.language)
    if reason:
        return None, reason
    here = False
    with contextlib.suppress(ModuleNotFoundError):  # of a package above it
        here = util.find_spec(kernel.module) is not None
    if not here:
        return None, ""
    try:
        return registry.get_plan(kernel).requires, ""
    except (ModuleNotFoundError, UserError) as error:
        return None, str(error)


def cannot(requirement: Requirement) -> dict[Device, str]:
    """Known devices that do not meet the requirement, and why, without the device's own name."""
    from mla_var3.device import Device

    found = {}
    for device in Device.all():
        verdict = device.can_run(requirement)
        if not verdict:
            found[device] = _ARCH.sub("", verdict.reason)
    return found


def of_records(kernel: tuple[str, str, int], records: Mapping[str, Record]) -> dict[str, str]:
    """Device key -> reason, of the version's records that were skipped for the architecture. kernel: an entry's."""
    found = {}
    for record in records.values():
        of = record["kernel"]
        if record["status"] == "skipped" and (of["design"], of["language"], of["version"]) == kernel:
            reason = str(record.get("reason") or "")
            if _ARCH.search(reason):
                found[str(record["device"])] = _ARCH.sub("", reason)
    return found


def stated(entry: Entry) -> dict[str, str]:
    """What the entry says; empty where it says nothing, or nothing readable."""
    value = entry.fields.get(FIELD)
    return {str(k): str(v).strip() for k, v in value.items()} if isinstance(value, Mapping) else {}


def check(entry: Entry, kernel: KernelId | None, records: Mapping[str, Record]) -> tuple[list[Finding], str]:
    """(findings, why the version's requirement could not be read). kernel None: a version that is gone."""
    line = next((n for n, row in enumerate(entry.text.split("\n"), 1) if row.startswith(f"{FIELD}:")), 1)
    if not entry.fields:
        return [], ""
    requirement, why = (None, "") if kernel is None else requirement_of(kernel)
    refused = None if requirement is None else cannot(requirement)
    messages = [*_form(entry, refused), *_owed(entry, refused, of_records(entry.kernel, records))]
    return [Finding(line, message) for message in messages], why


def _form(entry: Entry, refused: Mapping[Device, str] | None) -> Iterator[str]:
    from mla_var3.device import Device

    if FIELD not in entry.fields:
        return
    if not isinstance(entry.fields[FIELD], Mapping) or not entry.fields[FIELD]:
        yield f"{FIELD} must name where the version does not run, and why: {FIELD}: {{{OTHERS}: wgmma needs sm_90a}}"
        return
    devices = Device.all()
    known = {*(d.key for d in devices), *(d.arch for d in devices), OTHERS}
    for name, reason in stated(entry).items():
        if name not in known:
            yield f"{FIELD} names {name!r}, which is no device or architecture: {nearest(name, known)}"
            continue
        if not reason:
            yield f"{FIELD} gives no reason for {name}"
        if refused is None:
            continue
        mine = [d for d in devices if name in (d.key, d.arch, OTHERS)]
        runs = [d.key for d in mine if d not in refused]
        if name == OTHERS and not refused:
            yield f"{FIELD} says {OTHERS}, and the version runs on every known device"
        elif name != OTHERS and runs:
            yield f"{FIELD} names {name}, and the version runs on {', '.join(runs)}"


def _owed(entry: Entry, refused: Mapping[Device, str] | None, skipped: Mapping[str, str]) -> Iterator[str]:
    said = stated(entry)
    if OTHERS in said:
        return
    missing: dict[str, list[str]] = {}
    for device, reason in (refused or {}).items():
        if not {device.key, device.arch} & said.keys():
            missing.setdefault(reason, []).append(f"{device.key} ({device.arch})")
    for reason, names in missing.items():
        yield f"it does not say that the version cannot run on {', '.join(names)}: add {FIELD}: {{{OTHERS}: {reason}}}"
    known = {device.key: device.arch for device in refused or {}}
    for key, reason in skipped.items():
        if key not in known and key not in said:
            yield f"records say that it was skipped on {key} ({reason}), and {FIELD} does not: add {key}: {reason}"


def words(kernel: KernelId) -> str:
    """The field for a new entry, with a line break before it; "" for a version that runs everywhere."""
    requirement, _ = requirement_of(kernel)
    refused = {} if requirement is None else cannot(requirement)
    if not refused:
        return ""
    reasons = list(dict.fromkeys(refused.values()))
    if len(reasons) == 1:
        return f"\n{FIELD}: {{{OTHERS}: {reasons[0]}}}"
    by_arch = {device.arch: reason for device, reason in refused.items()}
    return f"\n{FIELD}: {{{', '.join(f'{arch}: {reason}' for arch, reason in by_arch.items())}}}"
