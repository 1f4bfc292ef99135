"""Models of the transformers package, built from a config without any download: one recording equals the torch loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import tfnb
from tests.models.check import Draw, Objective, check
from tests.models.test_models import floats, ids, inputs, padding
from tfnb.errors import BranchChanged

OFF = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}


def called(*names: str) -> Objective:
    """The model's own loss, its inputs passed by these names; a padding mask is turned into 1 for what counts."""

    def objective(model: nn.Module, *args: torch.Tensor) -> tuple[Any, torch.Tensor]:
        out = model(**{name: (~x).long() if x.dtype == torch.bool else x for name, x in zip(names, args, strict=True)})
        return out.logits, out.loss

    return objective


def bert(**kwargs: Any) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, num_labels=3, problem_type="single_label_classification", **OFF, **kwargs,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def gpt2(**kwargs: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=30, n_embd=12, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False, bos_token_id=0, eos_token_id=0, **kwargs,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(**kwargs: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=30, hidden_size=12, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, use_cache=False, **kwargs,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def vit(**kwargs: Any) -> nn.Module:
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        num_labels=3, **OFF, **kwargs,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def t5(**kwargs: Any) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=30, d_model=12, d_kv=6, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0, **kwargs,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


TEXT = inputs(ids(30, 6), padding(6), ids(30, 6))

CASES: dict[str, tuple[Callable[..., nn.Module], Objective, Draw]] = {
    "bert": (bert, called("input_ids", "attention_mask", "labels"), inputs(ids(30, 6), padding(6), ids(3))),
    "gpt2": (gpt2, called("input_ids", "labels"), inputs(ids(30, 6), ids(30, 6))),
    "gpt2, eager attention": (
        lambda: gpt2(attn_implementation="eager"), called("input_ids", "labels"), inputs(ids(30, 6), ids(30, 6))
    ),
    "llama": (llama, called("input_ids", "attention_mask", "labels"), TEXT),
    "t5": (t5, called("input_ids", "attention_mask", "labels"), TEXT),
    "vit": (vit, called("pixel_values", "labels"), inputs(floats(3, 8, 8), ids(3))),
}  # fmt: skip


# the masks of the package depend on whether any place is padded: in these batches some always is
@pytest.mark.filterwarnings("ignore:.*Python took the (True|False) branch of a recorded value")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", CASES)
def test_model(name: str, training: bool) -> None:
    make, objective, draw = CASES[name]
    check(make(), objective, draw, training=training)


def test_batch_without_padding_is_refused_by_what_was_recorded_with_padding() -> None:
    model = bert().eval()
    with pytest.warns(UserWarning, match="Python took the False branch"), tfnb.record():
        tokens, mask = tfnb.placeholder(torch.ones(2, 4, dtype=torch.long)), tfnb.placeholder(torch.eye(2, 4) + 1 > 1)
        logits = model(input_ids=tokens, attention_mask=mask).logits
    with pytest.raises(BranchChanged, match="was recorded with False"):
        tfnb.run(logits, {tokens: torch.ones(3, 4, dtype=torch.long), mask: torch.ones(3, 4, dtype=torch.bool)})
