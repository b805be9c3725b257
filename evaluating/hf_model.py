"""A checkpoint's model as transformers knows models; `export_hf.py` copies this file."""

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from model import GPT, MEANING, ModelConfig, preset

MODEL = preset("124m", "lssar").to_dict()  # the fields of a ModelConfig, and their defaults


class LssarConfig(PreTrainedConfig):
    model_type = "lssar"
    attribute_map = {  # noqa: RUF012 - transformers reads it from the class
        "hidden_size": "width",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
    }

    def __init__(self, train_length: int = 1024, meaning: int = MEANING, **options):
        self.train_length = train_length  # not a limit: what it has seen
        self.meaning = meaning
        for key, default in MODEL.items():
            setattr(self, key, options.pop(key, default))
        super().__init__(**options)

    @classmethod
    def from_dict(cls, config_dict: dict, **options):
        """Refuse weights that mean something else than this code computes."""
        if (found := config_dict.get("meaning")) != MEANING:
            meaning = f"the weights have meaning {found!r:.20}, this code computes {MEANING}"
            raise ValueError(f"{meaning} (model.MEANING): export the checkpoint again")
        return super().from_dict(config_dict, **options)


class Seen:
    """The cache that GPT expects, around one of transformers or none, with the padding mask."""

    def __init__(self, cache, tokens: Tensor, mask: Tensor | None):
        self.cache = cache
        self.length = 0 if cache is None else int(cache.get_seq_length())
        keys = self.length + tokens.shape[1]
        if mask is None:
            mask = None if cache is None else tokens.new_ones(len(tokens), keys)
        elif mask.dim() != 2 or mask.shape[1] < keys:
            shape, wanted = tuple(mask.shape), f"(batch, {keys}), 0 for padding"
            raise ValueError(f"attention_mask of shape {shape}: give {wanted}")
        self.mask = None if mask is None else mask[:, :keys].bool()  # which keys are tokens

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return (k, v) if self.cache is None else self.cache.update(k, v, layer)


class LssarForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = LssarConfig
    base_model_prefix = "gpt"
    main_input_name = "input_ids"

    def __init__(self, config: LssarConfig):
        super().__init__(config)
        self.gpt = GPT(ModelConfig.from_dict({key: getattr(config, key) for key in MODEL}))
        self.post_init()

    def _init_weights(self, module) -> None:
        """GPT initialises itself."""

    def get_input_embeddings(self):
        return self.gpt.embedding

    def set_input_embeddings(self, embedding) -> None:
        self.gpt.embedding = embedding

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **_) -> Tensor | None:
        """The padding mask is all that is needed, with a static cache too."""
        return attention_mask

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values=None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **_,
    ) -> CausalLMOutputWithPast:
        """`attention_mask` (B, keys): 0 for padding, left or right. Label -100 is ignored."""
        if past_key_values is None and use_cache:
            past_key_values = DynamicCache()
        hidden = self.gpt.hidden(input_ids, Seen(past_key_values, input_ids, attention_mask))
        logits = self.gpt.logits(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
        loss = None
        if labels is not None:
            targets = labels[:, 1:].flatten()
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
