"""Bytes of a picture file to an RGB image, upright, in 8 bits; whatever else they are is refused."""

import io
import warnings

from PIL import Image, ImageOps, UnidentifiedImageError

from runtime_min.vision.rule import MediaError

# Decoders written for pictures from strangers; the others of Pillow (EPS runs a program) stay shut.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM")
# 16 times the pixels that the model can see at most, and a third of a gigabyte as RGB.
MAX_PIXELS = 110_000_000
MAX_BYTES = 256 << 20
SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N", "I")
ORIENTATION, SIDEWAYS = 0x0112, (5, 6, 7, 8)


def opened(where: str, data: bytes) -> Image.Image:
    """The picture in `data`, its header read and its size accepted, pixels not decoded yet.

    Raises MediaError that names `where` for non-images, formats that are not taken, and decompression bombs.
    """
    if len(data) > MAX_BYTES:
        raise MediaError(f"{where}: {len(data):,} bytes, at most {MAX_BYTES:,} are taken; send it smaller")
    try:
        with warnings.catch_warnings():
            # The size is judged below, with the same answer whatever Pillow's own limit is.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as e:
        raise MediaError(f"{where}: is no picture in {', '.join(FORMATS)}") from e
    except Image.DecompressionBombError as e:
        raise MediaError(f"{where}: {_bomb(str(e))}") from e
    except (OSError, ValueError, SyntaxError, EOFError, OverflowError) as e:
        raise MediaError(f"{where}: cannot be read as a picture: {e}") from e
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise MediaError(f"{where}: {_bomb(f'{width} x {height}')}")
    if not width or not height:
        raise MediaError(f"{where}: is {width} x {height} pixels, expected at least one")
    return image


def _bomb(found: str) -> str:
    return f"too many pixels ({found}), at most {MAX_PIXELS:,} are taken; send it smaller"


def rgb(where: str, image: Image.Image) -> Image.Image:
    """`image` decoded, turned as its EXIF says, without alpha, in RGB; of an animation the first frame.

    Alpha is dropped, not blended. Of 16 bits the upper eight are kept. Raises MediaError for what cannot be decoded.
    """
    try:
        image.load()
        upright = ImageOps.exif_transpose(image)
        if upright.mode in SIXTEEN_BIT:
            return _upper_bits(where, upright).convert("RGB")
        if upright.mode == "F":
            raise MediaError(f"{where}: has floating-point pixels, whose white is not known; send 8 or 16 bits")
        return upright if upright.mode == "RGB" else upright.convert("RGB")
    except MediaError:
        raise
    except Exception as e:
        # Decoders raise whatever they like on damaged input: OSError, SyntaxError, struct.error, IndexError, ...
        raise MediaError(f"{where}: is damaged or cut short: {e}") from e


def _upper_bits(where: str, image: Image.Image) -> Image.Image:
    """16-bit gray to 8-bit gray."""
    low, high = image.convert("I").getextrema()
    if not (isinstance(low, int | float) and isinstance(high, int | float)) or low < 0 or high > 65535:
        raise MediaError(f"{where}: has gray values {low}..{high}, whose white is not known; send 8 or 16 bits")
    return image.convert("I").point(lambda v: v * (1 / 256)).convert("L")


def upright_size(where: str, image: Image.Image) -> tuple[int, int]:
    """(width, height) that `rgb` will give; decodes only where a format may say the turn after the pixels."""
    width, height = image.size
    # Pillow states the size of a TIFF as already turned.
    if image.format == "TIFF":
        return width, height
    try:
        turned = image.getexif().get(ORIENTATION) in SIDEWAYS
    except Exception as e:
        raise MediaError(f"{where}: is damaged or cut short: {e}") from e
    return (height, width) if turned else (width, height)
