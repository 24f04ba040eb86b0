"""Loss scale: the factor by which the loss of a float16 step is multiplied before backward.

Gradients are smaller than activations, and float16 has no numbers below 6e-8: scaling preserves them. A scale that is
too large makes gradients overflow. Such a step is skipped, and the scale falls. It rises again after many good steps,
so it stays near the largest that fits.
"""

from typing import Any

from vitpar.recipe.sections.training import LossScaleSection


class LossScaler:
    """Loss scale of a run, step by step.

    Every rank has its own and updates it with the same overflows, so all stay equal.

    Source: DynamicGradScaler of Megatron-LM and of ColossalAI; without hysteresis, "Mixed Precision Training" (arXiv
    1710.03740), section 3.2.
    """

    def __init__(self, settings: LossScaleSection) -> None:
        self._settings = settings
        self.scale = settings.initial_scale
        """Factor of the loss of the coming step."""
        self.exhausted = False
        """Whether the last step overflowed and the scale should have fallen, but is at its minimum already.

        Continuing is then useless. A constant scale is always at its minimum.
        """
        self._good_steps = 0
        self._hysteresis_left = settings.hysteresis

    @property
    def _bounds(self) -> tuple[float, float]:
        s = self._settings
        return (s.min_scale, s.max_scale) if s.dynamic else (s.initial_scale, s.initial_scale)

    @property
    def floor(self) -> str:
        """Setting below which the scale may not fall, with its value."""
        name = "min_scale" if self._settings.dynamic else "initial_scale"
        return f"loss_scale.{name} {self._bounds[0]:,.10g}"

    def update(self, overflow: bool) -> None:
        """Update the scale after a step. overflow: whether the step overflowed on any rank."""
        s, (smallest, largest) = self._settings, self._bounds
        self.exhausted = False
        if not overflow:
            self._good_steps += 1
            if self._good_steps == s.growth_interval:
                self._good_steps, self._hysteresis_left = 0, s.hysteresis
                self.scale = min(self.scale * s.growth_factor, largest)
            return
        self._good_steps = 0
        self._hysteresis_left = max(self._hysteresis_left - 1, 0)
        if self._hysteresis_left == 0:
            self.exhausted = self.scale <= smallest
            self.scale = max(self.scale * s.backoff_factor, smallest)

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as plain numbers."""
        return {"scale": self.scale, "good_steps": self._good_steps, "hysteresis_left": self._hysteresis_left}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`, limited to the present settings."""
        smallest, largest = self._bounds
        self.scale = min(max(state["scale"], smallest), largest)
        self._good_steps = min(state["good_steps"], self._settings.growth_interval - 1)
        self._hysteresis_left = min(state["hysteresis_left"], self._settings.hysteresis)
        self.exhausted = False
