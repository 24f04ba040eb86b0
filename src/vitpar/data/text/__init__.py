"""Packed text: tokenizers, packing, reading, batches and masking.

>>> pack_text("corpus.txt", "data_shards/corpus", tokens=128)
>>> text = TextSet.open("data_shards/corpus", "train")
>>> loader = TextLoader(text, order=SampleOrder(seed=0, size=len(text)), batch_size=32)
>>> batch = next(iter(loader))
>>> arrays = batch.ids.numpy(), batch.lengths.numpy(), batch.keys.numpy()
>>> inputs, targets = mlm(*arrays, text.specials, text.vocab_size)
"""
