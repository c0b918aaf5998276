// Before the first paint, so that nobody sees the other theme flash by. Without a choice the system's is followed.
(() => {
  try {
    const chosen = localStorage.getItem("forerun-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // Storage can be forbidden; then the system's theme it is.
  }
})();
