"""Random short texts: label specifications, augmentation policies, URLs, clusters, models and lists of hosts."""

from __future__ import annotations

import random

_LONG = ("x" * 5_000, "\0", "\x1b[31m", "\ud800", "", " ", "9" * 5_000, "{" * 5_000, "\u202e", "a\nb")


def label(draw: random.Random) -> str:
    """Return a label specification."""
    return draw.choice(
        ("cls", "json", "folder", "json:label", "json:", "cls:x", "JSON", "json:a:b", "json:\0", ":", *_LONG)
    )


def policy(draw: random.Random) -> str:
    """Return an augmentation policy."""
    numbers = ("0", "1", "2", "9", "10", "-1", "0.5", "1e9", "inf", "nan", "99999999999", "")
    parts = [
        draw.choice(("m", "n", "mstd", "inc", "p", "w", "x", "")) + draw.choice(numbers)
        for _ in range(draw.choice((1, 2, 3, 50)))
    ]
    sane = f"rand-m{draw.randint(0, 10)}-n{draw.randint(1, 3)}-mstd0.5-inc1"
    return draw.choice(
        (sane, "original", "3a", "-".join(["rand", *parts]), "-".join(["augmix", *parts]), draw.choice(_LONG))
    )


def url(draw: random.Random) -> str:
    """Return a URL of shards with braces. Some URLs run a command."""
    braces = (
        "{0..3}",
        "{000..127}",
        "{0..999999999999}",
        "{a..z}",
        "{a,b}",
        "{0..9}" * 12,
        "{a,b}" * 40,
        "{" * 2_000,
        "{0..10..0}",
    )
    braces = (
        *braces,
        "{10..0}",
        "{-5..5}",
        "{0..5..-1}",
        "{}",
        "{a}",
        "}{",
        "{a,{b,{c,d}}}",
        "{" + "a," * 50_000 + "}",
        "{0..9" + "9" * 5_000 + "}",
    )
    braces = (
        *braces,
        "{\u0661..\u0665}",
        "{0x0..0x9}",
        "{a..\U0010ffff}",
        "{1.0..2.0}",
        "{001..1000000}",
        "{" * 900 + "a,b" + "}" * 900,
    )
    begins = (
        "https://host/",
        "http://127.0.0.1:1/",
        "/data/",
        "file:///x/",
        "pipe:cat ",
        "s3://b/",
        "gs://b/",
        "PIPE:sh ",
        "pipe:",
        "ftp://x/",
    )
    begins = (
        *begins,
        "",
        "-o/tmp/x ",
        " pipe:sh",
        "http:pipe:",
        "htgs://x",
        "ais://x",
        "file:pipe:sh ",
        "|sh",
        "hf://x/",
        "local:x",
    )
    return (
        draw.choice(begins) + "train-" + draw.choice(braces) + draw.choice((".tar", "", ".tar.gz", draw.choice(_LONG)))
    )


def cluster(draw: random.Random) -> str:
    """Return the name of a cluster."""
    kind = draw.choice(("H100", "h100", "A100", "H200", "x", "", "../../x", "H100.toml", "/etc/passwd", *_LONG))
    numbers = ("", "8x", "1x", "32x8x", "0x8x", "99999x99x", "99999x64x", "4096x8x", "512x8x", "-1x", "8x8x8x", "1e3x")
    return draw.choice(numbers) + kind


def model(draw: random.Random) -> str:
    """Return the name of a model."""
    sane = (
        "vit_small_patch16_224",
        "vit_giant_patch14_224",
        "vit_huge_patch14_224",
        "deit3_base_patch16_224",
        "vit_custom",
    )
    return draw.choice(
        (draw.choice(sane), "vit_", "vit_small_patch16_9999999", draw.choice(sane) + draw.choice(_LONG), *_LONG)
    )


def hosts(draw: random.Random) -> str:
    """Return a list of hosts in SLURM's notation."""
    numbers = (
        "1-3",
        "01-03,7",
        "1",
        "1-999999999999",
        "3-1",
        "0-65535",
        "0-65536",
        "-1",
        "1-",
        "",
        "a",
        "[1]",
        "9" * 5_000,
        "\u0661-\u0665",
    )
    parts = [
        f"{draw.choice(('n', 'node-', '', 'a.b', 'x' * 60))}[{draw.choice(numbers)}]"
        for _ in range(draw.choice((1, 2, 6)))
    ]
    around = (" ", "]", "[", ",", "", "\n", "[[", "x" * 50 + " ", "x," * 30_000, draw.choice(_LONG))
    sane = f"n[01-{draw.randint(2, 99)},7],b{draw.randint(0, 9)}"
    return draw.choice(
        (sane, ",".join(parts), "".join(parts), ",".join(parts) + draw.choice(around), "x" * 60 + draw.choice(around))
    )
