"""Published families of decoders: a function sets what all sizes of a family share.

No page: the pages of sizes (gemma3_270m.py ..) call it, and set those themselves.
"""

import pathlib
import runpy

from prope.config import set_layer_percentages

wikipedia = runpy.run_path(str(pathlib.Path(__file__).with_name("gemma_300m_wiki.py")))


def on_wikipedia():
    """Returns the config of gemma_300m_wiki.py, whose training the sizes share."""
    return wikipedia["get_config"]()


def gemma2(config):
    config.model.rope_percentage = 1.0
    config.model.post_norms = True
    config.model.attention_softcap = 50.0
    config.model.final_softcap = 30.0
    config.model.layer_types = ("sliding_attention", "full_attention")
    config.model.sliding_window = 4096


def gemma3(config):
    config.model.rope_percentage = 1.0
    config.model.max_wavelength = 1e6
    config.model.local_max_wavelength = 1e4
    config.model.post_norms = True
    config.model.use_qk_norm = True
    config.model.layer_types = ("sliding_attention",) * 5 + ("full_attention",)
    config.model.sliding_window = 512  # 1024 from 4B on


def gemma4(config):
    """Sets what all sizes share; E2B and E4B have layer inputs and share keys and values."""
    config.model.rope_percentage = 0.25
    config.model.local_rope_percentage = 1.0
    config.model.max_wavelength = 1e6
    config.model.local_max_wavelength = 1e4
    config.model.post_norms = True
    config.model.use_qk_norm = True
    config.model.use_value_norm = True
    config.model.use_skip_scale = True
    config.model.attention_scale = 1.0
    config.model.final_softcap = 30.0
    config.model.global_head_dim = 512
    config.model.layer_types = ("sliding_attention",) * 5 + ("full_attention",)
    config.model.sliding_window = 1024  # 512 in E2B and E4B


def llama(config):
    """Sets what Llama 3, SmolLM, Qwen and Mistral share, with the epsilon of Llama 3."""
    config.model.rope_percentage = 1.0
    config.model.activation = "silu"
    config.model.norm_epsilon = 1e-5
    config.model.scale_embedding = False


def smollm3(config):
    """Sets the llama family's fields; every fourth layer does not rotate: set num_layers before."""
    llama(config)
    config.model.norm_epsilon = 1e-6
    config.model.max_wavelength = 5e6
    set_layer_percentages(config, [1, 1, 1, 0] * (config.model.num_layers // 4))


def qwen3(config):
    llama(config)
    config.model.norm_epsilon = 1e-6
    config.model.max_wavelength = 1e6
    config.model.use_qk_norm = True
