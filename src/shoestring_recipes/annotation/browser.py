"""Opens pages in Debian's Chromium, to get text that scripts write."""

from __future__ import annotations

import os
import shutil
import time
from urllib.parse import urlsplit

from shoestring.core.errors import ConfigError

try:
    from selenium import webdriver
    from selenium.common.exceptions import TimeoutException, WebDriverException
    from selenium.webdriver.chrome.service import Service
except ImportError as error:
    raise ConfigError("a browser needs Selenium", hint='pip install "shoestring[annotation]"') from error

SETTLED = 0.25
"""Seconds for which the text of a page must not change before it counts as complete."""


class PageRenderer:
    """A headless Chromium that can reach only one host.

    Args:
        url: address whose host the browser may reach; other host names do not resolve in it.
        agent: name of the browser in requests.
        timeout: seconds after which a page is taken as it is.
        delay: seconds between two pages.
    """

    def __init__(self, url: str, agent: str, timeout: float, delay: float) -> None:
        browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
        if browser is None or driver is None:
            raise ConfigError("there is no Chromium with its driver", hint="apt install chromium chromium-driver")
        options = webdriver.ChromeOptions()
        options.binary_location = browser
        options.unhandled_prompt_behavior = "dismiss"
        rules = f"MAP * ~NOTFOUND, EXCLUDE {urlsplit(url).hostname}"
        for flag in (
            "--headless=new",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-extensions",
            "--no-first-run",
            f"--user-agent={agent}",
            f"--host-resolver-rules={rules}",
            *(["--no-sandbox"] if os.getuid() == 0 else []),  # Chromium has no sandbox for root
        ):
            options.add_argument(flag)
        images = {"profile.managed_default_content_settings.images": 2}
        options.add_experimental_option("prefs", {"download_restrictions": 3, **images})
        self.timeout, self.delay, self.opened = timeout, delay, 0.0
        try:
            self.driver = webdriver.Chrome(options, Service(driver))
        except WebDriverException as error:
            raise ConfigError(f"Chromium does not start: {(error.msg or '').partition(chr(10))[0]}") from error
        self.driver.set_page_load_timeout(timeout)

    def render(self, url: str) -> tuple[str, str]:
        """Open a page, wait until its text settles, and return its final address and its HTML; if the page cannot be
        opened, return the reason and an empty text."""
        time.sleep(max(self.opened + self.delay - time.monotonic(), 0))
        self.opened = end = time.monotonic()
        end += self.timeout
        try:
            self.driver.get(url)
        except TimeoutException:
            pass  # use what has loaded so far
        except WebDriverException as error:
            return f"the browser: {(error.msg or '').partition(chr(10))[0]}", ""
        try:
            before, text = None, self._text()
            while text != before and time.monotonic() < end:
                time.sleep(SETTLED)
                before, text = text, self._text()
            return self.driver.current_url, self.driver.page_source
        except WebDriverException as error:
            return f"the browser: {(error.msg or '').partition(chr(10))[0]}", ""

    def _text(self) -> str:
        return self.driver.execute_script("return document.body ? document.body.innerText : ''")

    def close(self) -> None:
        """End the browser."""
        self.driver.quit()
