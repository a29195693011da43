"""Chromium without a window, driven by selenium: for the animation, and for the tests of the page."""

import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DRIVER = "chromedriver"


def missing() -> str:
    """A message with what is not installed here and how to install it, or "" if nothing is missing."""
    if not any(map(shutil.which, NAMES)) or shutil.which(DRIVER) is None:
        return "no Chromium and chromedriver here (on Debian and Ubuntu: apt install chromium chromium-driver)"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "this Python has no selenium: pip install selenium"
    return ""


def started(width: int = 1280, height: int = 1000):
    """`with started() as browser:`, a selenium WebDriver. It is given all paths, so it downloads nothing."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = next(path for path in map(shutil.which, NAMES) if path)
    for switch in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{switch}")
    options.add_argument(f"--window-size={width},{height}")
    return webdriver.Chrome(options, webdriver.ChromeService(shutil.which(DRIVER)))
