"""Which versions a sweep's patterns name."""

from __future__ import annotations

from mla_var3.sweep import config as sweep_config
from mla_var3.sweep.plan import chosen_kernels


def test_wildcards_name_what_computes_what_the_experiment_asks_for() -> None:
    def labels(*words: str) -> set[str]:
        return {k.label for k in chosen_kernels(sweep_config.compose(list(words)))}

    decode = labels("experiment=decode")
    assert "torch/flash_mla" in decode and not {"peer/fa4", "peer/cudnn_sdpa"} & decode
    assert not any("flash_attention" in label or "mla_var6_plus" in label for label in decode)
    assert labels("experiment=prefill") >= {"peer/fa4", "peer/cudnn_sdpa"}
    assert "peer/fa4" in labels("experiment=decode", "kernels=peer/fa4,torch/flash_mla")
