"""Packed text: tokenizers, packing, reading, batches and masking.

>>> pack_text("corpus.txt", "data_shards/corpus", tokens=128)
>>> text = TextSet.open("data_shards/corpus", "train")
>>> loader = TextLoader(text, order=SampleOrder(seed=0, size=len(text)), batch_size=32)
>>> batch = next(iter(loader))
>>> arrays = batch.ids.numpy(), batch.lengths.numpy(), batch.keys.numpy()
>>> inputs, targets = mlm(*arrays, text.specials, text.vocab_size)
"""

from typing import TYPE_CHECKING

from vitpar.lazy import lazy_names

if TYPE_CHECKING:
    from vitpar.data.text.loader import TextBatch, TextEvalLoader, TextLoader
    from vitpar.data.text.masking import Spans, mlm, shift_right, span_lengths, spans, tokens_for_inputs
    from vitpar.data.text.pack import pack_text
    from vitpar.data.text.section import Specials, TextSection
    from vitpar.data.text.text_set import TextSet
    from vitpar.data.text.tokenizer import Tokenizer, open_tokenizer

_LAZY = {
    "vitpar.data.text.loader": ("TextBatch", "TextEvalLoader", "TextLoader"),
    "vitpar.data.text.masking": ("Spans", "mlm", "shift_right", "span_lengths", "spans", "tokens_for_inputs"),
    "vitpar.data.text.pack": ("pack_text",),
    "vitpar.data.text.section": ("Specials", "TextSection"),
    "vitpar.data.text.text_set": ("TextSet",),
    "vitpar.data.text.tokenizer": ("Tokenizer", "open_tokenizer"),
}
__getattr__ = lazy_names(__name__, _LAZY)
__all__ = [
    "Spans",
    "Specials",
    "TextBatch",
    "TextEvalLoader",
    "TextLoader",
    "TextSection",
    "TextSet",
    "Tokenizer",
    "mlm",
    "open_tokenizer",
    "pack_text",
    "shift_right",
    "span_lengths",
    "spans",
    "tokens_for_inputs",
]
