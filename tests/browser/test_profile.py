"""What is known of the machine and the drafters: charts, or the command that makes them."""

from __future__ import annotations

from browser.conftest import screenshot, until_ready

NAMES = ("staircase", "reliability", "frontier")


def test_what_was_measured_is_drawn(visit, measured):
    """The three commands of the fixture have filled the three charts, each with its numbers as a table."""
    page = visit(measured, "#profile").page
    page.fill("#key", measured.key)
    page.keyboard.press("Enter")
    until_ready(page)
    for name in NAMES:
        page.wait_for_selector(f"#chart-{name} svg")
        assert page.locator(f"#chart-{name} .dot").count() >= 2, name
        assert page.locator(f"#empty-{name}").is_hidden()
        page.locator(f"#table-{name} summary").click()
        assert page.locator(f"#table-{name} tbody tr").count() >= 2, name
    assert "delayed" in page.locator("#profile-about").inner_text()
    ways = page.locator("#table-frontier tbody td:first-child").all_inner_texts()
    assert {"plain", "fixed:2", "delayed"} == set(ways)
    plain = page.locator("#chart-frontier .line.s5").count()
    assert plain == 2, "plain decoding is grey, in the chart and in its legend"
    assert set(page.locator("#chart-frontier text").all_text_contents()) >= {"1", "2"}, "points say their load"
    page.select_option("#reliability-source", index=1)
    legend = page.locator("#chart-reliability .legend").inner_text()
    assert "as given: mean error" in legend
    assert "calibrated: mean error" in legend
    assert any("held-out" in text for text in page.locator("#reliability-source option").all_inner_texts())
    for name in NAMES:
        page.locator(f"#table-{name} summary").click()
    screenshot(page, "profile-light")


def test_what_was_not_measured_names_its_command(visit, served):
    """For these very models; what the server has decoded is shown without any command."""
    page = until_ready(visit(served, "#profile").page)
    page.wait_for_selector("#empty-staircase code")
    commands = {name: page.locator(f"#empty-{name} code").inner_text() for name in ("staircase", "frontier")}
    assert commands["staircase"] == "forerun profile embedded --drafter ngram,small"
    assert commands["frontier"] == "forerun bench load --target embedded --drafter ngram,small"
    served.post("/v1/completions", {"prompt": "def area(shape):", "max_tokens": 64, "temperature": 0})
    page.click("#profile-refresh")
    page.wait_for_selector("#chart-reliability .dot")
    assert page.locator("#reliability-source").input_value() == "served"
    screenshot(page, "profile-empty")
