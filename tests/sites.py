"""Sites of decoders that no configuration describes, for tests of flows and caches."""

from collections.abc import Mapping

from isobit.precision.flow import DecoderShape, LinearShape, SiteShape


def shape_of_layers(layers: int, linears: Mapping[str, LinearShape]) -> DecoderShape:
    """The sites of layers with these linears, the first of which is that of Q, K and V."""
    sites = [SiteShape("embed_tokens", "embedding")]
    for layer in range(layers):
        path = f"layers.{layer}"
        first, *others = (
            SiteShape(f"{path}.{name}", "linear", layer, linear) for name, linear in linears.items()
        )
        sites += [
            first,
            SiteShape(f"{path}.kv_cache", "kv_cache", layer),
            SiteShape(f"{path}.attention", "attention", layer),
            *others,
            SiteShape(f"{path}.norms", "norm", layer),
        ]
    sites += [SiteShape("norm", "norm"), SiteShape("lm_head", "head")]
    return DecoderShape(layers, tuple(sites))
