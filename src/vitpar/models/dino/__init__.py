"""Vision Transformers with the heads of DINOv2 (arXiv 2304.07193), on several crops of each image at once."""
