"""What verl 0.9.1 needs with transformers 5.17 or 5.19 and torch 2.11 or 2.13, without flash-attn.

verl imports this module in each of its processes (``actor_rollout_ref.model.external_lib``). Nothing happens before the
trainer builds its model. Then, in that process only:

- ``flash_attn`` is a module made here. Its attention is torch's ``varlen_attn``, FlashAttention 2 with a backward pass,
  which is also what our trainer uses. Its padding functions are verl's own. vLLM's processes do not see it.
- The attention of Qwen2.5-VL stays as transformers has it: verl's replacement imports a function that transformers 5.17
  no longer has. Both read the bounds of packed sequences from the position ids; transformers' does not copy the keys
  and values for each query head.
- The position ids of pictures are a nested tensor, which loses the axis of its lengths between processes. verl repairs
  the axis on the assumption that the lengths differ. With equal lengths torch has joined the rows along the other axis,
  and the repair makes the tensor invalid. Here both cases are repaired.
- A tied LM head is not sent to the sampler. vLLM 0.32 refuses it in a bucket that does not hold the embedding, and verl
  fills its buckets in the order of the state dict.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import inspect
import sys
import types
from typing import Any

import torch
import verl.workers.engine.fsdp.transformer_impl as fsdp

VERSION = "2.8.3"  # of flash-attn, as verl 0.9.1 asks for it


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """flash-attn's signature over torch's kernel, without dropout, windows and soft caps.

    Raises:
        NotImplementedError: one of these is asked for.
    """
    from torch.nn.attention.varlen import varlen_attn

    if dropout_p or softcap or deterministic or tuple(window_size) != (-1, -1):
        raise NotImplementedError("the benchmark's flash_attn has neither dropout, windows, soft caps nor determinism")
    # torch 2.13 refuses fewer key heads than query heads without this argument, which older versions do not have
    shared = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    longest_q = int(max_seqlen_q)
    longest_k = longest_q if max_seqlen_k is max_seqlen_q else int(max_seqlen_k)
    window = (-1, 0) if causal else (-1, -1)
    return varlen_attn(
        q,
        k,
        v,
        cu_seqlens_q.to(torch.int32),
        cu_seqlens_k.to(torch.int32),
        longest_q,
        longest_k,
        scale=softmax_scale,
        window_size=window,
        **shared,
    )


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """Sequences of one length: batch, sequence, heads, width."""
    batch, length = q.shape[:2]
    ends_q = torch.arange(batch + 1, device=q.device, dtype=torch.int32) * length
    ends_k = torch.arange(batch + 1, device=q.device, dtype=torch.int32) * k.shape[1]
    flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    settings = (dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    return flash_attn_varlen_func(*flat, ends_q, ends_k, length, k.shape[1], *settings).view(q.shape)


def flash_attn_with_kvcache(*_: Any, **__: Any) -> torch.Tensor:
    """transformers imports it, and only its own decoding calls it; here vLLM decodes."""
    raise NotImplementedError("the benchmark's flash_attn does not decode")


def stand_in_for_flash_attn() -> None:
    """Lets transformers find a ``flash_attn`` in this process. A real one is left alone."""
    import transformers.utils.import_utils as found
    from verl.utils import attention_utils

    if "flash_attn" in sys.modules or importlib.util.find_spec("flash_attn") is not None:
        return
    package, padding = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.bert_padding")
    for module in (package, padding):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=module is package)
    package.__path__ = []
    functions = {"bert_padding": padding, "__version__": VERSION}
    functions |= {f.__name__: f for f in (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)}
    vars(package).update(functions)
    for name in ("index_first_axis", "pad_input", "unpad_input", "rearrange"):
        setattr(padding, name, getattr(attention_utils, f"_fallback_{name}"))
    sys.modules |= {"flash_attn": package, "flash_attn.bert_padding": padding}
    found.PACKAGE_DISTRIBUTION_MAPPING["flash_attn"] = ["flash-attn"]
    for check in (found.is_flash_attn_2_available, found.is_flash_attn_greater_or_equal):
        getattr(check, "cache_clear", lambda: None)()


def keep_qwen2_5_vl_attention() -> None:
    import verl.models.transformers.qwen2_vl as patches
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLAttention

    patches.qwen2_vl_attn_forward = Qwen2_5_VLAttention.forward


def leave_trl_out() -> None:
    """verl patches a class of TRL, if TRL is installed, that TRL 1.16 no longer has."""
    import verl.models.transformers.monkey_patch as patches

    patches.is_trl_available = lambda: False


def repair_position_ids(data: Any) -> None:
    """Replaces verl's ``maybe_fix_3d_position_ids``. Position ids of each sequence: 4 x its length."""
    from verl.utils.tensordict_utils import nested_tensor_from_tensor_list

    positions = data["position_ids"] if "position_ids" in data.keys() else None  # noqa: SIM118, a TensorDict
    if positions is None or not positions.is_nested or positions.dim() != 3:
        return
    values, ends = positions.values(), positions.offsets()
    if values.shape[0] == ends[-1]:  # equal lengths: the rows of all sequences, one below the other
        data["position_ids"] = nested_tensor_from_tensor_list(list(values.split(ends.diff().tolist())), ragged_idx=2)
    else:
        positions._ragged_idx = 2


def repair_axis_of_position_ids() -> None:
    import verl.utils.tensordict_utils as batches
    import verl.workers.engine.base as base
    import verl.workers.engine_workers as workers

    for module in (batches, base, workers):
        vars(module)["maybe_fix_3d_position_ids"] = repair_position_ids


def leave_tied_head_out(engine: Any) -> None:
    """Let the engine send the sampler no LM head that is the embedding."""
    if not engine.model_config.hf_config.get_text_config().tie_word_embeddings:
        return
    send = engine.get_per_tensor_param

    @functools.wraps(send)
    def without_head(*arguments: Any, **options: Any) -> Any:
        weights, adapter = send(*arguments, **options)
        return ((name, value) for name, value in weights if name != "lm_head.weight"), adapter

    engine.get_per_tensor_param = without_head


def _patch_before(build: Any) -> Any:
    @functools.wraps(build)
    def patched(self: Any) -> Any:
        stand_in_for_flash_attn()
        keep_qwen2_5_vl_attention()
        leave_trl_out()
        repair_axis_of_position_ids()
        leave_tied_head_out(self)
        return build(self)

    return patched


if not hasattr(fsdp.FSDPEngine._build_module, "__wrapped__"):
    fsdp.FSDPEngine._build_module = _patch_before(fsdp.FSDPEngine._build_module)
