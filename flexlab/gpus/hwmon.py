"""A card's hwmon folder: temperatures, power, fan and clocks, each only where the card has it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from flexlab.core.text import clean_line
from flexlab.gpus.files import list_names, read_count, read_text

_MICRO = 1_000_000
_MILLI = 1000
_CLOCK_LABELS = {"sclk": "clock_core_mhz", "mclk": "clock_memory_mhz"}
_FULL_PWM = 255


class Hwmon(NamedTuple):
    """Which files of which meaning there are: looked up once, read every tick."""

    folder: Path
    temps: tuple[tuple[str, Path], ...]
    """(name of the reading, file in milli degrees)"""
    power: tuple[Path, ...]
    """In micro watts; the first that gives a number counts."""
    clocks: tuple[tuple[str, Path], ...]
    """In Hz."""


def find(device: Path, driver: str | None) -> Hwmon | None:
    """The hwmon of the card whose sysfs folder is `device`; its number is not stable."""
    folder = _folder(device / "hwmon", driver)
    if folder is None:
        return None
    names = list_names(folder)
    temps, clocks = [], []
    for name in names:
        sensor, _, kind = name.partition("_")
        if kind != "input":
            continue
        label = clean_line(read_text(folder / f"{sensor}_label") or "").lower()
        if sensor.startswith("temp"):
            temps.append((f"temp_{label or sensor}_c", folder / name))
        elif sensor.startswith("freq") and label in _CLOCK_LABELS:
            clocks.append((_CLOCK_LABELS[label], folder / name))
    # The average first: it is there on every generation and does not jump.
    power = [folder / name for name in ("power1_average", "power1_input") if name in names]
    return Hwmon(folder, tuple(temps), tuple(power), tuple(clocks))


def read(sensors: Hwmon) -> dict[str, float]:
    """The values now, by the names of spec.machine.GpuReading."""
    values: dict[str, float] = {}
    for name, path in sensors.temps:
        milli = read_count(path)
        if milli:  # 0: the sensor is not fitted
            values[name] = milli / _MILLI
    for path in sensors.power:
        micro = read_count(path)
        if micro is not None:
            values["power_w"] = micro / _MICRO
            break
    for name, path in sensors.clocks:
        hertz = read_count(path)
        if hertz is not None:
            values[name] = hertz / _MICRO
    limit = read_count(sensors.folder / "power1_cap")
    if limit:
        values["power_limit_w"] = limit / _MICRO
    rpm = read_count(sensors.folder / "fan1_input")
    if rpm is not None:  # 0 is a fan that stands still
        values["fan_rpm"] = rpm
    duty = read_count(sensors.folder / "pwm1")
    if duty is not None and duty <= _FULL_PWM:
        values["fan_percent"] = round(100 * duty / _FULL_PWM, 1)
    return values


def _folder(parent: Path, driver: str | None) -> Path | None:
    """The one that bears the driver's name; a card may have others (a fan controller's)."""
    folders = [parent / name for name in list_names(parent) if name.startswith("hwmon")]
    for folder in folders:
        if driver and (read_text(folder / "name") or "").strip() == driver:
            return folder
    nameless = [folder for folder in folders if not os.path.exists(folder / "name")]
    return nameless[0] if len(nameless) == 1 else None
