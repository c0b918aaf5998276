"""For everybody: by keyboard alone, light and dark, on a narrow screen, without motion, for those who listen."""

from __future__ import annotations

import pytest

from browser.conftest import screenshot, until, until_ready

VIEWS = ("playground", "race", "live", "profile")

CONTRASTS = """
() => {
  const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => {
    probe.clearRect(0, 0, 1, 1);
    probe.fillStyle = colour;
    probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (colour) => {
    const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = rgb(colour).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const resolved = (name) => {
    const node = document.createElement("i");
    node.style.color = `var(--${name})`;
    document.body.append(node);
    const found = getComputedStyle(node).color;
    node.remove();
    return found;
  };
  const ratio = (a, b) => {
    const [x, y] = [light(resolved(a)), light(resolved(b))].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const texts = ["ink", "muted", "good", "warn", "bad", "accent", "drafted", "corrected", "bonus"];
  const pairs = texts.flatMap((text) => ["card", "sunken", "ground"].map((on) => [text, on]));
  pairs.push(["on-accent", "accent"]);
  return Object.fromEntries(pairs.map(([text, on]) => [`${text} on ${on}`, ratio(text, on)]));
}
"""
"""Contrast of every text colour on every ground, by the formula of WCAG 2."""

NAMELESS = """
() => [...document.querySelectorAll("button, input, select, textarea")].filter((node) => {
  const labels = [...(node.labels ?? [])].map((label) => label.textContent.trim());
  return !(node.getAttribute("aria-label") || (node.matches("button") && node.textContent.trim()) || labels.join(""));
}).map((node) => node.outerHTML)
"""


def test_by_keyboard_alone(visit, served):
    """From the start to an answer, through it, into the race and its verdict, to help and back: no mouse."""
    page = until_ready(visit(served, reduced_motion="reduce").page)
    keys = page.keyboard
    keys.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    for _ in range(12):
        if page.evaluate("document.activeElement.id") == "tab-playground":
            break
        keys.press("Tab")
    assert page.evaluate("document.activeElement.id") == "tab-playground"
    keys.press("/")
    assert page.evaluate("document.activeElement.id") == "prompt"
    keys.press("Control+a")
    keys.type("import re\n")
    keys.press("Control+Enter")
    page.wait_for_selector("#answers .answer .badge.done")
    for _ in range(30):
        if "token" in page.evaluate("document.activeElement.className"):
            break
        keys.press("Tab")
    keys.press("ArrowRight")
    assert page.locator("#tip").is_visible()
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    keys.press("2")
    assert page.evaluate("document.activeElement.id") == "tab-race"
    keys.press("Control+Enter")
    page.wait_for_selector("#verdict:visible")
    assert page.locator("#verdict h2").inner_text() == "Identical"
    keys.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-live"
    keys.press("End")
    assert page.locator("#panel-profile").is_visible()
    keys.press("?")
    page.wait_for_selector("#help-dialog[open]")
    screenshot(page, "help")
    keys.press("Escape")
    assert page.evaluate("document.activeElement.id") == "tab-profile"
    assert page.locator("#help-dialog").is_hidden()


def test_single_keys_can_be_switched_off(visit, served):
    """By keyboard, in the list of keys (WCAG 2.1.4): then only a button or a chord acts, here and after a reload."""
    page = until_ready(visit(served).page)
    keys = page.keyboard
    keys.press("?")
    page.focus("#single-keys")
    keys.press("Space")
    keys.press("Escape")
    for _ in range(2):
        for key in ("2", "t", "?", "/"):
            keys.press(key)
        assert page.locator("#panel-playground").is_visible()
        assert page.evaluate("document.documentElement.dataset.theme ?? 'system'") == "system"
        assert page.locator("#help-dialog").is_hidden()
        assert page.evaluate("document.activeElement.id") != "prompt"
        assert page.locator("#theme").get_attribute("aria-keyshortcuts") is None
        page.reload()
        until_ready(page)
    page.focus("#help")
    keys.press("Enter")
    page.focus("#single-keys")
    keys.press("Space")
    keys.press("Escape")
    keys.press("2")
    assert page.locator("#panel-race").is_visible()


def test_a_drafter_that_copies_is_called_so(visit, served):
    """By the server's own name for it."""
    page = visit(served).page

    def copying(route):
        info = route.fetch().json()
        info["speculative_config"] = [{"name": "dspark", "label": "dspark+lookup", "method": "dspark"}]
        route.fulfill(json=info)

    page.route("**/server_info", copying)
    page.reload()
    until_ready(page)
    assert " dspark+lookup " in page.locator("#about").inner_text()


def test_streams_are_said_aloud(visit, served):
    """A live region says that it begins, what was generated and that it is done; not every token by itself."""
    page = until_ready(visit(served).page)
    page.evaluate(
        """() => { window.said = []; new MutationObserver(() => said.push(document.getElementById("said").textContent))
        .observe(document.getElementById("said"), { childList: true, characterData: true, subtree: true }); }"""
    )
    page.fill("#max-tokens", "24")
    page.click("#generate")
    page.wait_for_selector("#answers .answer .badge.done")
    until(page, "said.some((text) => text.includes('Done: 24 tokens'))")
    assert len(page.evaluate("said")) < 12
    assert page.locator("#said").get_attribute("aria-live") == "polite"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_can_be_read(visit, served, scheme):
    """The system's scheme is followed; every text colour has a contrast of 4.5 on every ground it is used on."""
    page = until_ready(visit(served, color_scheme=scheme).page)
    ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert ground == {"light": "rgb(244, 246, 249)", "dark": "rgb(13, 17, 23)"}[scheme]
    poor = {pair: round(ratio, 2) for pair, ratio in page.evaluate(CONTRASTS).items() if ratio < 4.5}
    assert not poor


def test_the_theme_can_be_chosen(visit, served):
    """Against the system's; the choice outlives a reload."""
    page = until_ready(visit(served, color_scheme="light").page)
    for expected in ("light", "dark"):
        page.click("#theme")
        assert page.locator("#theme").inner_text() == f"Theme: {expected}"
    page.reload()
    until_ready(page)
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(13, 17, 23)"
    page.click("#theme")
    assert page.locator("#theme").inner_text() == "Theme: system"


@pytest.mark.parametrize("view", VIEWS)
def test_a_narrow_screen_is_enough(visit, served, view):
    """At 400 pixels nothing is cut off: the page does not scroll sideways."""
    page = until_ready(visit(served, f"#{view}", viewport={"width": 400, "height": 800}).page)
    if view == "playground":
        page.fill("#max-tokens", "40")
        page.click("#generate")
        page.wait_for_selector("#answers .answer .badge.done")
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    screenshot(page, f"narrow-{view}")


def test_everything_has_a_name(visit, served):
    """Every control says what it is; views and their tabs belong together."""
    page = until_ready(visit(served).page)
    assert page.evaluate(NAMELESS) == []
    for view in VIEWS:
        assert page.locator(f"#tab-{view}").get_attribute("aria-controls") == f"panel-{view}"
        assert page.locator(f"#panel-{view}").get_attribute("aria-labelledby") == f"tab-{view}"
    assert page.locator('[role="tab"][tabindex="0"], [role="tab"]:not([tabindex])').count() == 1


def test_pictures_of_the_dark_theme(visit, served):
    """For looking at: every view in the dark, after an answer and a race."""
    page = until_ready(visit(served, color_scheme="dark", reduced_motion="reduce").page)
    page.fill("#temperature", "0")
    page.click("#generate")
    page.wait_for_selector("#answers .answer .badge.done")
    screenshot(page, "playground-dark")
    page.keyboard.press("Escape")
    page.click("#tab-race")
    page.click("#race-start")
    page.wait_for_selector("#verdict:visible")
    screenshot(page, "race-dark")
    page.click("#tab-live")
    page.wait_for_selector("#chart-speed svg")
    screenshot(page, "live-dark")


def test_a_phone_shows_the_answer(visit, served):
    """Below the form as it is there, it comes into view; a tap tells of a token what a mouse would."""
    page = until_ready(visit(served, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True).page)
    page.fill("#max-tokens", "24")
    page.tap("#generate")
    page.wait_for_selector("#answers .answer .badge.done")
    top = page.evaluate("document.querySelector('#answers .answer').getBoundingClientRect().top")
    assert 0 <= top < 844
    page.locator("#answers .token").nth(3).tap()
    page.wait_for_selector("#tip:visible")
