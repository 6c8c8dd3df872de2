"""What would make many devices faster, tried on the model itself. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lockstep.forecast.scaling import Setting, Step, predict
from lockstep.strategies import auto_strategy

#: A change is worth a word from this gain in samples a second on.
WORTH = 0.03
BUCKETS_MB = (1, 5, 10, 25, 50, 100, 200)


def advise(step: Step, devices: int, setting: Setting, *, ddp_fits: bool | None = None) -> list[str]:
    """Lines for people, the largest gain first; each one alone, on ``devices`` devices.

    Args:
        ddp_fits: whether the model fits a device whole; ``None``: not known.
    """
    if devices == 1:
        return []
    now = predict(step, devices, setting)
    lines = sorted(_options(step, devices, setting, now.samples_per_s), reverse=True)
    found = [f"{text}: {gain:+.0%} samples/s on {devices} GPUs" for gain, text in lines if gain >= WORTH]
    if ddp_fits is False and not setting.sharded:
        sharded = auto_strategy(devices, fits=False)
        found.insert(0, f"--strategy {sharded}: the model with its gradients and optimizer does not fit one GPU")
    share = {name: seconds / now.step_s for name, seconds in now.parts.items()}
    if share["data"] > WORTH:
        found.append(f"input takes {share['data']:.0%} of the step: more --num-workers, or cheaper preprocessing")
    if share["straggler"] > WORTH:
        found.append(
            f"waiting for the slowest takes {share['straggler']:.0%}: find what makes steps uneven (`bench step`)"
        )
    return found or ["nothing to gain: computation is " + f"{share['compute']:.0%} of the step"]


def _options(step: Step, devices: int, setting: Setting, rate: float) -> Iterator[tuple[float, str]]:
    for factor in (2, 4):
        larger = replace(
            step,
            batch_size=step.batch_size * factor,
            forward_s=step.forward_s * factor,
            backward_s=step.backward_s * factor,
            data_s=step.data_s * factor,
        )
        yield predict(larger, devices, setting).samples_per_s / rate - 1, f"--batch-size {larger.batch_size}"
        more = replace(setting, accumulate=setting.accumulate * factor)
        yield predict(step, devices, more).samples_per_s / rate - 1, f"--grad-accum-steps {more.accumulate}"
    if setting.sharded:
        hybrid = replace(setting, hybrid=True)
        gain = predict(step, devices, hybrid).samples_per_s / rate - 1
        if setting.cluster.per_node > 1:
            yield gain, "--set fsdp.sharding=hybrid (if the GPUs of one node have room for the model)"
        return
    if setting.joint:
        return
    caps = {cap: predict(step, devices, replace(setting, bucket_bytes=cap << 20)).samples_per_s for cap in BUCKETS_MB}
    best = max(caps, key=lambda cap: caps[cap])
    yield caps[best] / rate - 1, f"--set distributed.bucket_cap_mb={best}"
    yield (
        predict(step, devices, replace(setting, half=True)).samples_per_s / rate - 1,
        "gradients sent in 16 bits (no setting of Lockstep)",
    )
