// Sets the theme before the first paint; a module would run too late for that.
(() => {
  const THEMES = ["auto", "light", "dark"];
  const root = document.documentElement;
  let theme = "auto";
  try {
    theme = localStorage.getItem("foredraft-theme") ?? "auto";
  } catch {
    // Storage is forbidden: the choice lasts as long as the page.
  }

  function apply(button) {
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
    if (button) button.textContent = `Theme: ${theme}`;
  }

  if (!THEMES.includes(theme)) theme = "auto";
  apply(null);
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    apply(button);
    button.addEventListener("click", () => {
      theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
      try {
        localStorage.setItem("foredraft-theme", theme);
      } catch {
        // As above.
      }
      apply(button);
    });
  });
})();
