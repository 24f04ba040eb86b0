"""The sections of a recipe: every setting with its type, range, default and effect.

input: [task], [model], [data], [stream], [augment]. training: [optimizer], [lr_schedule], [lora], [train], [distill],
[loss_scale].
running: [checkpoint], [faults], [parallel], [communication], [track].
"""
