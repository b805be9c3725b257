"""Wraps a checkpoint's model as a model of transformers; `export_hf.py` copies this file."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from lssar.spans import Arrangement, arrange, bounded
from lssar.tracing import can_look_at
from model import GPT, WEIGHTS_VERSION, ModelConfig, preset

MODEL = preset("124m", "lssar").to_dict()  # the fields of a ModelConfig, and their defaults
MODEL |= {"positions": "rope", "pattern": ["global"], "local": None, "shift": False}


class LssarConfig(PreTrainedConfig):
    model_type = "lssar"
    attribute_map = {  # noqa: RUF012 - transformers reads it from the class
        "hidden_size": "width",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "heads",
        "max_position_embeddings": "train_length",
    }

    def __init__(self, train_length: int = 1024, meaning: int = WEIGHTS_VERSION, **options):
        self.train_length = train_length  # not a limit: what it has seen
        self.meaning = meaning
        for key, default in MODEL.items():
            setattr(self, key, options.pop(key, default))
        super().__init__(**({"tie_word_embeddings": True} | options))

    @classmethod
    def from_dict(cls, config_dict: dict, **options):
        """Refuse weights of another version than this code computes."""
        if (found := config_dict.get("meaning")) != WEIGHTS_VERSION:
            raise ValueError(
                f"the weights are of version {found!r:.20}, this code computes {WEIGHTS_VERSION} "
                "(model.WEIGHTS_VERSION): export the checkpoint again"
            )
        return super().from_dict(config_dict, **options)


class Seen:
    """Gives GPT's layers the cache that they expect, around one of transformers or none.

    `place` is the position of each token in its own sequence. `mask` is the set of keys that it
    sees: itself and the tokens before it back to place 0, none of them padding.
    """

    def __init__(self, cache, x: Tensor, mask: Tensor | None, place: Tensor | None):
        self.cache = cache
        batch, length = x.shape[:2]
        start = 0 if cache is None else cache.get_seq_length()
        if isinstance(start, Tensor) and can_look_at(start):
            start = int(start)
        rows = torch.arange(length, device=x.device) + start  # of the queries among the keys
        fixed = isinstance(start, Tensor)  # a static cache in a graph, or on a GPU
        keys = cache.get_max_length() if fixed else start + length
        self.place = rows if place is None else place
        self.mask: Arrangement | None = None
        if mask is None and place is None and cache is None:
            return
        if mask is None:
            mask = x.new_ones(batch, keys)
        if mask.dim() != 2 or mask.shape[1] < (0 if fixed else keys):
            raise ValueError(
                f"attention_mask of shape {tuple(mask.shape)}: give (batch, {keys}), 0 for padding"
            )
        tokens = nn.functional.pad(mask[:, :keys].bool(), (0, max(0, keys - mask.shape[1])))
        if fixed:
            tokens = tokens & (torch.arange(keys, device=x.device) <= rows[-1])
        count = tokens.cumsum(1)[:, rows]
        if place is None:
            self.place = (count - 1).clamp(min=0)
        else:  # packed sequences: each token sees as many as its own has so far
            count = torch.minimum(count, place + 1)
        self.mask = arrange(tokens, length, rows, count)

    def extend(self, layer: int, k: Tensor, v: Tensor, *gates: Tensor, **_) -> tuple[Tensor, ...]:
        """Append keys, values and gates of a layer, and return all that the cache holds of it."""
        if self.cache is None:
            return k, v, *gates
        # These caches hold keys and values only, so a gate is stored as one more dimension of k.
        k, v = self.cache.update(torch.cat((k, *(gate.to(k) for gate in gates)), -1), v, layer)
        return (k[..., :-1], v, k[..., -1:]) if gates else (k, v)


class LssarPreTrainedModel(PreTrainedModel):
    config_class = LssarConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012 - transformers reads them from the class

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise rows that are added later; GPT initialises itself."""
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


class LssarModel(LssarPreTrainedModel):
    """Maps token ids or their embeddings to hidden states."""

    def __init__(self, config: LssarConfig):
        super().__init__(config)
        self.gpt = GPT(ModelConfig.from_dict({key: getattr(config, key) for key in MODEL}))
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.gpt.embedding

    def set_input_embeddings(self, embedding: nn.Embedding) -> None:
        self.gpt.embedding = embedding

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values=None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **_,
    ) -> BaseModelOutputWithPast:
        """Return the hidden states.

        `attention_mask` (B, keys) is 0 for padding, left or right. `position_ids` (B, L) count from
        0 in each sequence; a sequence begins where they start again.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give one of input_ids and inputs_embeds")
        if output_attentions:
            raise ValueError("output_attentions: the weights are never made; see attention_maps.py")
        x = self.gpt.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if cu_seq_lens_q is not None and position_ids is None:  # packed, by their bounds
            starts = bounded(cu_seq_lens_q.to(x.device), x.shape[1])
            position_ids = (torch.arange(x.shape[1], device=x.device) - starts)[None]
        recomputing = self.gradient_checkpointing and self.training
        if past_key_values is None and use_cache and not recomputing:
            past_key_values = DynamicCache()
        seen = Seen(past_key_values, x, attention_mask, position_ids)
        rope = self.gpt.rope(seen.place)
        states = ()
        for block in self.gpt.blocks:
            states += (x,)
            if recomputing:
                x = self._gradient_checkpointing_func(block.__call__, x, rope, seen)
            else:
                x = block(x, rope, seen)
        x = self.gpt.norm(x)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden = (*states, x) if output_hidden_states else None
        return BaseModelOutputWithPast(x, past_key_values, hidden)


class LssarForCausalLM(LssarPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.gpt.embedding.weight"}  # noqa: RUF012
    accepts_loss_kwargs = True

    def __init__(self, config: LssarConfig):
        super().__init__(config)
        self.model = LssarModel(config)
        self.lm_head = nn.Linear(config.width, config.vocab_rows, bias=False)
        self.post_init()

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args, **options):
        """Resize the tied embedding and head, and note the new size in both configs."""
        embedding = super().resize_token_embeddings(new_num_tokens, *args, **options)
        rows = embedding.num_embeddings
        vocabulary = self.model.gpt.config.vocab_size if new_num_tokens is None else new_num_tokens
        sizes = {"vocab_size": vocabulary, "vocab_rows": rows}
        self.config.update(sizes)
        self.model.gpt.config = replace(self.model.gpt.config, **sizes)
        return embedding

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **_) -> Tensor | None:
        """Return the padding mask, which is all that is needed, with a static cache too."""
        return attention_mask

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values=None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **options,
    ) -> CausalLMOutputWithPast:
        """Return the logits and, with labels, the loss; the other arguments are `LssarModel`'s.

        Label -100 is ignored. With `num_items_in_batch` the loss is the sum divided by it, as in
        every model of transformers.
        """
        outputs = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            **options,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        logits = logits[..., : self.config.vocab_size].float().contiguous()
        loss = None
        if labels is not None or options.get("shift_labels") is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **options)
        return CausalLMOutputWithPast(loss, logits, outputs.past_key_values, outputs.hidden_states)
