"""From a picture file or a clip to patches and their grid: Pillow and torch only, PyAV for video files."""
