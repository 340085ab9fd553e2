"""Shapes against hand arithmetic, and against what real modules hold, cache and multiply."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig

from lit_rl.testing import tiny_config
from lit_rl.throughput import LayerShape, ModelShape, model_flops

# Dense, grouped-query, multi-query, experts of every storage, latent attention, windows, biases, tied and untied.
EXACT = (
    "llama mistral qwen2 qwen3 qwen3_moe mixtral qwen2_moe gemma gemma2 gemma3_text gemma4_text phi phi3 phimoe gpt2 "
    "gpt_neo gpt_neox gptj gpt_bigcode opt bloom falcon mpt olmo olmo2 olmo3 olmoe cohere cohere2 starcoder2 stablelm "
    "deepseek_v2 deepseek_v3 gpt_oss glm4 glm4_moe granite granitemoe jetmoe smollm3 ernie4_5_moe minimax_m2 exaone4 "
    "seed_oss"
)
# Their scan or convolution is not counted, which the shape says.
WITH_SCANS = ["jamba", "mamba", "bamba", "lfm2", "qwen3_next"]


def real_model(architecture):
    model = AutoModelForCausalLM.from_config(tiny_config(architecture), attn_implementation="eager").eval()
    model.set_experts_implementation("eager")
    return model


def cached_numbers(cache):
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.numel() for tensor in tensors if isinstance(tensor, torch.Tensor))


@pytest.mark.parametrize("architecture", EXACT.split())
def test_parameters_flops_and_cache_are_those_of_the_real_module(architecture):
    model, length = real_model(architecture), 3
    shape = ModelShape.from_config(model.config)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        output = model(torch.tensor([[5, 6, 7]]), use_cache=True)
    assert model_flops(shape, [length], work="forward").model == counter.get_total_flops()
    assert shape.cache_bytes(length, bytes_per_value=1) == cached_numbers(output.past_key_values)
    assert shape.notes == () or "latent" in shape.notes[0]


@pytest.mark.parametrize("architecture", WITH_SCANS)
def test_layers_without_attention_cache_nothing_and_are_noted(architecture):
    model = real_model(architecture)
    shape = ModelShape.from_module(model)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    with torch.no_grad():
        output = model(torch.tensor([[5, 6, 7]]), use_cache=True)
    cache = output.get("past_key_values")
    assert shape.cache_bytes(3, bytes_per_value=1) == (0 if cache is None else cached_numbers(cache))
    assert "layers without softmax attention" in shape.notes[0]


def test_stacked_experts_of_any_name_are_experts():
    (layer,) = ModelShape.from_config(tiny_config("jetmoe")).layers
    model = real_model("jetmoe")
    stacked = [p for p in model.model.layers[0].parameters() if p.ndim == 3]
    assert all(weight.shape[0] == layer.experts == 4 for weight in stacked)
    assert layer.expert_weights == sum(weight.numel() for weight in stacked) // 4


def test_gpt_neo_alternates_full_and_local_attention():
    full, local = ModelShape.from_config(tiny_config("gpt_neo", window_size=4)).layers
    assert (full.attention, full.window) == ("full", None)
    assert (local.attention, local.window) == ("sliding", 4)


def test_only_active_experts_are_multiplied():
    # 2 layers x (4 x 64 x 64 attention + 2 of 8 experts of 3 x 64 x 256) + head 1000 x 64
    shape = ModelShape.decoder(
        hidden=64, layers=2, vocabulary=1000, feed_forward=256, query_heads=4, experts=8, experts_per_token=2, tied=True
    )
    assert shape.multiplied_weights == 2 * (16_384 + 2 * 49_152) + 64_000 == 293_376
    assert shape.parameters == 2 * (16_384 + 8 * 49_152) + 64_000 == 883_200
    assert model_flops(shape, [1]).body + model_flops(shape, [1]).head == 6 * 293_376


@pytest.mark.parametrize("tied", [True, False])
def test_look_ups_are_not_multiplied(tied):
    shape = ModelShape.decoder(hidden=64, layers=2, vocabulary=1000, feed_forward=256, query_heads=4, tied=tied)
    flops = model_flops(shape, [1])
    assert flops.body + flops.head == 6 * (131_072 + 64_000) == 1_170_432
    assert shape.parameters == 131_072 + (64_000 if tied else 128_000)


def test_cache_bytes_of_grouped_queries():
    config = LlamaConfig(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    assert ModelShape.from_config(config).cache_bytes_per_token() == 2 * 32 * 8 * 128 * 2 == 131_072


def test_qwen3_8b():
    shape = ModelShape.from_config("qwen3-8b")
    # attention 2 x 4096^2 + 2 x 4096 x 1024, network 3 x 4096 x 12288, norms 2 x 4096 + 2 x 128
    layer = 41_943_040 + 150_994_944 + 8_448
    assert shape.parameters == 36 * layer + 2 * 151_936 * 4096 + 4096 == 8_190_735_360
    assert shape.cache_bytes_per_token() == 2 * 36 * 8 * 128 * 2 == 147_456


def test_llama_and_mixtral():
    llama = ModelShape.from_config("llama-3.1-8b")
    assert llama.parameters == 32 * (41_943_040 + 3 * 4096 * 14_336 + 2 * 4096) + 2 * 128_256 * 4096 + 4096
    assert llama.parameters == 8_030_261_248
    mixtral = ModelShape.from_config("mixtral-8x7b")
    expert, rest = 3 * 4096 * 14_336, 41_943_040 + 8 * 4096 + 2 * 4096
    assert mixtral.parameters == 32 * (8 * expert + rest) + 2 * 32_000 * 4096 + 4096 == 46_702_792_704
    assert mixtral.active_parameters == mixtral.parameters - 32 * 6 * expert == 12_879_925_248


def test_deepseek_v3_caches_the_latent():
    shape = ModelShape.from_config("deepseek-v3")
    assert shape.cache_bytes_per_token() == 61 * (512 + 64) * 2 == 70_272
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    expert = 3 * 7168 * 2048
    dense, sparse = attention + 3 * 7168 * 18_432, attention + 9 * expert + 256 * 7168
    assert shape.body_weights == 3 * dense + 58 * sparse
    assert 671.0e9 < shape.parameters < 671.1e9
    assert "latent" in shape.notes[0]


def test_gemma_2_windows_stop_the_cache():
    shape = ModelShape.from_config("gemma-2-9b")
    per_layer = 2 * 8 * 256 * 2
    assert shape.cache_bytes(1000) == 42 * per_layer * 1000
    assert shape.cache_bytes(10_000) == 21 * per_layer * (4096 + 10_000)  # every second layer has a window of 4096
    assert shape.tied
    assert shape.parameters == 9_241_705_984


def test_gpt_oss_20b():
    shape = ModelShape.from_config("gpt-oss-20b")
    assert shape.parameters == 20_914_757_184
    expert = 2880 * 5760 + 2880 * 2880
    attention = 2880 * (4096 + 2 * 512) + 4096 * 2880
    assert shape.multiplied_weights == 24 * (attention + 32 * 2880 + 4 * expert) + 201_088 * 2880
    assert shape.cache_bytes_per_token() == 24 * 2 * 8 * 64 * 2
    assert [layer.window for layer in shape.layers] == [128, None]


def test_a_config_file_a_folder_and_a_dictionary_say_the_same(tmp_path):
    config = tiny_config("qwen3")
    config.save_pretrained(tmp_path)
    shapes = [ModelShape.from_config(given) for given in (config, tmp_path, str(tmp_path / "config.json"))]
    shapes.append(ModelShape.from_config(json.loads((tmp_path / "config.json").read_text())))
    assert len({(shape.parameters, shape.layers) for shape in shapes}) == 1
    assert shapes[1].name == tmp_path.name == shapes[2].name


def test_adapters_cost_rank_times_inputs_plus_outputs():
    shape = ModelShape.decoder(
        hidden=8, layers=3, vocabulary=10, feed_forward=20, query_heads=2, head_width=4, key_value_heads=1
    )
    # q 8+8, k 8+4, v 8+4, o 8+8; gate, up, down 28 each
    assert shape.adapter_weights(2) == 2 * 3 * (16 + 12 + 12 + 16)
    assert shape.adapter_weights(2, targets="all") == 2 * 3 * (56 + 84)


def test_layers_that_read_the_cache_of_earlier_layers_add_nothing():
    shape = ModelShape.from_config(CONFIG_MAPPING["gemma3n_text"]())
    assert shape.num_layers == 35
    assert shape.cache_bytes(1) == (35 - 15) * 2 * 2 * 256 * 2  # 15 layers share


def test_weights_that_layers_share_are_stored_once():
    config = CONFIG_MAPPING["zamba2"]()
    with torch.device("meta"):
        stored = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    shape = ModelShape.from_config(config)
    assert shape.parameters == stored
    assert shape.body_weights > 1.5 * stored  # a shared block is multiplied wherever it is used


def test_errors_say_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config at 'qwen9'.*qwen3-8b"):
        ModelShape.from_config("qwen9")
    with pytest.raises(ValueError, match="no `model_type`"):
        ModelShape.from_config({"hidden_size": 8})
    with pytest.raises(ValueError, match=r"does not accept this 'llama' config.*decoder"):
        ModelShape.from_config({"model_type": "llama", "hidden_size": 7, "num_attention_heads": 0})
    with pytest.raises(ValueError, match=r"no shape can be read.*experts.*num_experts_per_tok.*from_module"):
        ModelShape.from_config({"model_type": "deepseek_v2", "num_experts_per_tok": None})
    with pytest.raises(ValueError, match="has no `config`"):
        ModelShape.from_module(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="needs `window`"):
        LayerShape(attention="sliding")
    with pytest.raises(ValueError, match="3 but there are 2 experts"):
        LayerShape(experts=2, experts_per_token=3)
