"""Packed data sets of images and text, and each rank's batches of them.

>>> pack("digits", "data_shards/digits")
>>> shards = ShardSet.open("data_shards/digits", "train")
>>> order = SampleOrder(seed=0, size=len(shards))
>>> loader = TrainLoader(shards, TrainTransform(size=8, flip=0.0), order=order, batch_size=128)
>>> batch = next(iter(loader))
"""
