"""Sub-policies of AutoAugment (Cubuk et al. 2019, 1805.09501, tables 7 to 9).

Each line is a sub-policy of two operations, each given as (name, probability, magnitude).
"""

ORIGINAL = """
PosterizeOriginal 0.4 8     Rotate 0.6 9
Solarize 0.6 5              AutoContrast 0.6 5
Equalize 0.8 8              Equalize 0.6 3
PosterizeOriginal 0.6 7     PosterizeOriginal 0.6 6
Equalize 0.4 7              Solarize 0.2 4
Equalize 0.4 4              Rotate 0.8 8
Solarize 0.6 3              Equalize 0.6 7
PosterizeOriginal 0.8 5     Equalize 1.0 2
Rotate 0.2 3                Solarize 0.6 8
Equalize 0.6 8              PosterizeOriginal 0.4 6
Rotate 0.8 8                Color 0.4 0
Rotate 0.4 9                Equalize 0.6 2
Equalize 0.0 7              Equalize 0.8 8
Invert 0.6 4                Equalize 1.0 8
Color 0.6 4                 Contrast 1.0 8
Rotate 0.8 8                Color 1.0 2
Color 0.8 8                 Solarize 0.8 7
Sharpness 0.4 7             Invert 0.6 8
ShearX 0.6 5                Equalize 1.0 9
Color 0.4 0                 Equalize 0.6 3
Equalize 0.4 7              Solarize 0.2 4
Solarize 0.6 5              AutoContrast 0.6 5
Invert 0.6 4                Equalize 1.0 8
Color 0.6 4                 Contrast 1.0 8
Equalize 0.8 8              Equalize 0.6 3
"""
"""Policy for ImageNet, with timm's levels from 0 to 10."""
CIFAR10 = """
Invert 0.1 0                Contrast 0.2 6
Rotate 0.7 2                TranslateX 0.3 9
Sharpness 0.8 1             Sharpness 0.9 3
ShearY 0.5 8                TranslateY 0.7 9
AutoContrast 0.5 0          Equalize 0.9 0
ShearY 0.2 7                PosterizeOriginal 0.3 7
Color 0.4 3                 Brightness 0.6 7
Sharpness 0.3 9             Brightness 0.7 9
Equalize 0.6 0              Equalize 0.5 0
Contrast 0.6 7              Sharpness 0.6 5
Color 0.7 7                 TranslateX 0.5 8
Equalize 0.3 0              AutoContrast 0.4 0
TranslateY 0.4 3            Sharpness 0.2 6
Brightness 0.9 6            Color 0.2 8
Solarize 0.5 2              Invert 0.0 0
Equalize 0.2 0              AutoContrast 0.6 0
Equalize 0.2 0              Equalize 0.6 0
Color 0.9 9                 Equalize 0.6 0
AutoContrast 0.8 0          Solarize 0.2 8
Brightness 0.1 3            Color 0.7 0
Solarize 0.4 5              AutoContrast 0.9 0
TranslateY 0.9 9            TranslateY 0.7 9
AutoContrast 0.9 0          Solarize 0.8 3
Equalize 0.8 0              Invert 0.1 0
TranslateY 0.7 9            AutoContrast 0.9 0
"""
"""Policy for CIFAR-10, with torchvision's magnitudes from 0 to 9, 0 where the operation has none."""
SVHN = """
ShearX 0.9 4                Invert 0.2 0
ShearY 0.9 8                Invert 0.7 0
Equalize 0.6 0              Solarize 0.6 6
Invert 0.9 0                Equalize 0.6 0
Equalize 0.6 0              Rotate 0.9 3
ShearX 0.9 4                AutoContrast 0.8 0
ShearY 0.9 8                Invert 0.4 0
ShearY 0.9 5                Solarize 0.2 6
Invert 0.9 0                AutoContrast 0.8 0
Equalize 0.6 0              Rotate 0.9 3
ShearX 0.9 4                Solarize 0.3 3
ShearY 0.8 8                Invert 0.7 0
Equalize 0.9 0              TranslateY 0.6 6
Invert 0.9 0                Equalize 0.6 0
Contrast 0.3 3              Rotate 0.8 4
Invert 0.8 0                TranslateY 0.0 2
ShearY 0.7 6                Solarize 0.4 8
Invert 0.6 0                Rotate 0.8 4
ShearY 0.3 7                TranslateX 0.9 3
ShearX 0.1 6                Invert 0.6 0
Solarize 0.7 2              TranslateY 0.6 7
ShearY 0.8 4                Invert 0.8 0
ShearX 0.7 9                TranslateY 0.8 3
ShearY 0.8 5                AutoContrast 0.7 0
ShearX 0.7 2                Invert 0.1 0
"""
"""Policy for SVHN, with magnitudes as for CIFAR-10."""
