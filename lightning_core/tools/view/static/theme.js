// Loaded in <head> without defer, so that a page never flashes in the other theme.
(() => {
  const stored = localStorage.getItem("lightning-theme");
  if (stored) document.documentElement.dataset.theme = stored;
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      const dark = matchMedia("(prefers-color-scheme: dark)").matches;
      const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
      const next = now === "dark" ? "light" : "dark";
      document.documentElement.dataset.theme = next;
      localStorage.setItem("lightning-theme", next);
      dispatchEvent(new CustomEvent("themechange"));
    });
  });
})();
