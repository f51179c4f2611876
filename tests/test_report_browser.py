"""The page in a real browser: nothing is asked of the network, it fits a telephone, and every text has contrast."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from functools import cache, partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

from dspark_cache.cache_files import CacheFolder, Finding
from dspark_cache.examine import ShownSample, ShownSpan, VerifiedPart, no_texts, verified_part
from dspark_cache.report import render_report
from dspark_cache.verify import Distance, Report, verify_cache

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--enable-logging=stderr",
    "--v=0",
)
LEAST_CONTRAST = 4.5
WIDTHS = (360, 1400)
LONG = "sha256:" + "0123456789abcdef" * 8

MEASURE = """
const channels = text => text.match(/[\\d.]+/g).map(Number);
const luminance = ([r, g, b]) => {
  const linear = value => value <= 0.04045 * 255 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4;
  return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
};
const behind = element => {
  for (let one = element; one; one = one.parentElement) {
    const [r, g, b, alpha = 1] = channels(getComputedStyle(one).backgroundColor);
    if (alpha === 1) return [r, g, b];
    if (alpha !== 0) throw new Error("a translucent background");
  }
  return [255, 255, 255];
};
document.querySelectorAll("details").forEach(one => one.open = true);
const measured = {
  width: document.documentElement.clientWidth,
  scrollWidth: document.documentElement.scrollWidth,
  background: getComputedStyle(document.body).backgroundColor,
  texts: [],
  small: [],
};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || element.closest("script, desc")) continue;
  const style = getComputedStyle(element);
  const color = element.closest("svg") ? style.fill : style.color;
  const [one, other] = [luminance(channels(color)), luminance(behind(element))].sort((a, b) => b - a);
  measured.texts.push([walker.currentNode.data.trim().slice(0, 40), (one + 0.05) / (other + 0.05)]);
  const scale = element.ownerSVGElement ? element.getScreenCTM().a : 1;
  if (parseFloat(style.fontSize) * scale < 10) measured.small.push(walker.currentNode.data.trim());
}
const out = document.createElement("pre");
out.id = "measured";
out.textContent = JSON.stringify(measured);
document.body.append(out);
"""


@cache
def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser is installed: none of {', '.join(BROWSERS)} is on the PATH")
    return found


def run(page: Path, *flags: str, address: str | None = None) -> tuple[str, str]:
    """Open a page; return the document after its scripts, and what was logged.

    Args:
        page: Its file, beside which the browser keeps what it remembers.
        flags: More of them.
        address: Where the page is instead.
    """
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = [browser(), *FLAGS, profile, *flags, address or page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def without_policy(html: str) -> str:
    """Return a page that may do what its policy forbids."""
    policy = r'<meta http-equiv="Content-Security-Policy"[^>]*>'
    assert re.search(policy, html)
    return re.sub(policy, "", html)


def measure(tmp_path: Path, html: str, *, dark: bool = False) -> list[dict[str, Any]]:
    """Measure a page at each of `WIDTHS`, in frames: no window is as narrow as a telephone."""
    inner = without_policy(html).replace("</body>", f"<script>{MEASURE}</script></body>")
    (tmp_path / "inner.html").write_text(inner)
    frames = "".join(f'<iframe src="inner.html" style="width:{width}px;height:800px"></iframe>' for width in WIDTHS)
    outer = tmp_path / "outer.html"
    outer.write_text(
        f"<style>iframe {{ border: 0 }}</style><body>{frames}<script>onload = () => document.querySelectorAll('iframe')"
        ".forEach(frame => document.body.append(frame.contentDocument.getElementById('measured')))</script>"
    )
    scheme = f"--blink-settings=preferredColorScheme={int(not dark)}"
    dumped, _ = run(outer, "--allow-file-access-from-files", scheme, "--dump-dom")
    found = re.findall(r'<pre id="measured">(.*?)</pre>', dumped, re.DOTALL)
    assert len(found) == len(WIDTHS), dumped[-500:]
    return [json.loads(unescape(text)) for text in found]


@pytest.fixture
def make_page(make_cache: Callable[..., Path]) -> Callable[[int], str]:
    """Return a function that makes a page with everything a page may have, long words too."""

    def make(num_findings: int) -> str:
        folder = CacheFolder(make_cache(30, 16, seq_length=64, layers=3, train_data_path=LONG * 2))
        report = verify_cache(folder, "values")
        report.findings = [Finding(level="bytes", file="shard-000000.safetensors", message=LONG)] * num_findings
        report.num_recomputed = 4
        states = ("layer 0", "layer 1", "layer 2", "last hidden", "logits")
        report.distances = [Distance(state=state, mean=0.001234, worst=0.0056, limit=0.005) for state in states]
        train = verified_part(folder, report, no_texts(f"{LONG} is not {LONG}"))
        assert train.examined is not None
        spans = [
            ShownSpan(head=text, omitted=9000, tail=LONG, supervised=bool(n)) for n, text in enumerate((LONG, "ü\n"))
        ]
        sample = ShownSample(
            index=1, why="longest", num_tokens=9000, supervised_tokens=5, shown_tokens=1024, spans=spans
        )
        examined = replace(train.examined, samples=[sample])
        held_out = VerifiedPart(cache=folder, report=Report(level="bytes"), examined=None)
        return render_report({"train": replace(train, examined=examined), "eval": held_out})

    return make


@pytest.mark.parametrize("num_findings", [0, 3])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_and_every_text_can_be_read(
    tmp_path: Path, make_page: Callable[[int], str], num_findings: int, dark: bool
) -> None:
    for measured in measure(tmp_path, make_page(num_findings), dark=dark):
        assert measured["scrollWidth"] <= measured["width"]
        assert len(measured["texts"]) > 200
        assert [text for text in measured["texts"] if text[1] < LEAST_CONTRAST] == []
        assert measured["small"] == []
        assert (measured["background"] == "rgb(255, 255, 255)") != dark


def test_what_is_measured_would_be_found(tmp_path: Path, make_page: Callable[[int], str]) -> None:
    page = make_page(0).replace("--soft: #555b66", "--soft: #aaaaaa").replace("font: 12px", "font: 5px")
    page = page.replace("<h2", '<p style="width:500px">x</p><h2', 1)
    narrow, _ = measure(tmp_path, page)
    assert narrow["scrollWidth"] > narrow["width"]
    assert any(contrast < 3 for _, contrast in narrow["texts"])
    assert narrow["small"] != []


def requests_for(folder: Path, html: str) -> list[str]:
    """Serve a page to the browser; return the paths that it asks for."""
    (folder / "page.html").write_text(html)
    asked = []

    class Handler(SimpleHTTPRequestHandler):
        def log_request(self, *_: object) -> None:
            asked.append(self.path)

        def log_error(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        run(folder / "page.html", "--dump-dom", address=f"http://127.0.0.1:{server.server_port}/page.html")
        server.shutdown()
        thread.join()
    return asked


def test_nothing_but_the_page_is_asked_for(tmp_path: Path, make_page: Callable[[int], str]) -> None:
    """Also where its policy would not forbid it; an icon of a site would be asked for."""
    page = without_policy(make_page(1))
    assert requests_for(tmp_path, page) == ["/page.html"]
    more = page.replace("<h2", '<img src="more.png"><h2', 1)
    assert requests_for(tmp_path, more) == ["/page.html", "/more.png"]


def test_nothing_is_logged(tmp_path: Path, make_page: Callable[[int], str]) -> None:
    path = tmp_path / "page.html"
    path.write_text(make_page(1))
    dumped, logged = run(path, "--dump-dom")
    assert "</html>" in dumped
    assert "CONSOLE" not in logged


def test_what_the_page_forbids_is_forbidden(tmp_path: Path, make_page: Callable[[int], str]) -> None:
    """The policy of the page stops a script and a picture, if one came in all the same."""
    path = tmp_path / "page.html"
    intruder = '<script>document.title = "run"</script><img src="http://x.invalid/">'
    path.write_text(make_page(1).replace("<main>", f"<main>{intruder}"))
    dumped, logged = run(path, "--dump-dom")
    assert "<title>run</title>" not in dumped
    assert logged.count("Content Security Policy") == 2


def test_the_page_is_painted(tmp_path: Path, make_page: Callable[[int], str]) -> None:
    (tmp_path / "page.html").write_text(make_page(1))
    picture = tmp_path / "page.png"
    run(tmp_path / "page.html", "--window-size=1400,2000", f"--screenshot={picture}")
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 20_000
