"""Which optimizer a recipe asks for, with the settings of each."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

Implementation = Literal["auto", "foreach", "fused", "for-loop"]
"""Which of torch's optimizer implementations; auto is fused for AdamW and SGD, which alone have it, else foreach."""
AdjustLr = Literal["original", "match_rms_adamw"]
"""How the shape of a matrix changes Muon's learning rate, by the names of torch.optim.Muon."""
_Beta = Annotated[float, Field(ge=0, lt=1)]

# The settings that some optimizers use and others do not, and the defaults of an optimizer's own.
_USED = {
    "adamw": {"betas", "eps"},
    "sgd": {"momentum", "nesterov"},
    "lamb": {"betas", "eps"},
    "lars": {"momentum", "nesterov", "trust_coefficient"},
    "muon": {"betas", "eps", "momentum", "nesterov", "ns_steps", "adjust_lr_fn"},
}
_SOMETIMES_USED = frozenset().union(*_USED.values())
_DEFAULTS = {"lamb": {"eps": 1e-6}, "lars": {"momentum": 0.9}, "muon": {"momentum": 0.95, "nesterov": True}}


class OptimizerSection(BaseModel):
    """AdamW, SGD, LAMB, LARS or Muon. Weight decay leaves out biases, norms, positions, tokens and layer scales; so do
    LAMB's and LARS's trust ratios.

    Defaults that are an optimizer's own: eps 1e-6 for lamb, momentum 0.9 for lars, momentum 0.95 and nesterov for muon.
    Of muon, betas and eps are those of the AdamW for all that is no matrix of a block. trust_coefficient: of lars.
    ns_steps: Newton-Schulz iterations of muon.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: Literal["adamw", "sgd", "lamb", "lars", "muon"] = "adamw"
    lr: float = Field(1e-3, gt=0)
    weight_decay: float = Field(0.05, ge=0)
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    nesterov: bool = False
    trust_coefficient: float = Field(1e-3, gt=0)
    ns_steps: int = Field(5, ge=1, lt=100)
    adjust_lr_fn: AdjustLr = "match_rms_adamw"
    implementation: Implementation = "auto"

    @model_validator(mode="before")
    @classmethod
    def _own_defaults(cls, values: Any) -> Any:
        return {**_DEFAULTS.get(str(values.get("name")), {}), **values} if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _every_setting_is_used(self) -> Self:
        for field in sorted(_SOMETIMES_USED - _USED[self.name]):
            if (value := getattr(self, field)) != type(self).model_fields[field].default:
                raise ValueError(f"optimizer.{field} is {value!r}, which {self.name} does not use: leave it out")
        if self.nesterov and not self.momentum:
            raise ValueError(
                "optimizer.nesterov is a way to use momentum, which is 0: set optimizer.momentum, or nesterov to false"
            )
        if self.implementation in ("fused", "for-loop") and self.name not in ("adamw", "sgd"):
            raise ValueError(
                f"optimizer.implementation is {self.implementation!r}, which {self.name} does not have: use 'foreach' "
                f"or 'auto', which is the same"
            )
        return self

    @model_serializer(mode="wrap")
    def _used_settings(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without settings that are not used, so that a recipe written for one optimizer can be read for another."""
        idle = _SOMETIMES_USED - _USED[self.name]
        return {field: value for field, value in dump(self).items() if field not in idle}
