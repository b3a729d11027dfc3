// Keyboard use of all pages, declared by attributes:
//   data-rows            on the parent of rows: j and k move between the rows' first links, arrows too while one has the focus,
//                        x toggles the row's checkbox
//   data-search          on an input: / focuses it, Escape leaves it
//   data-prev, data-next on links to the page before and after: p and n
//   data-key="c"         on a link or button: the key clicks it
// A button with data-copy copies the <code> beside it.
(() => {
  const rows = () => [...document.querySelectorAll("[data-rows] > *")].filter((row) => !row.hidden && row.querySelector("a[href]"));
  const link = (row) => row.querySelector("a[href]");
  const current = (all) => all.findIndex((row) => row.contains(document.activeElement));

  function move(by) {
    const all = rows();
    if (!all.length) return false;
    const now = current(all);
    const next = now < 0 ? (by > 0 ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, now + by));
    link(all[next]).focus();
    all[next].scrollIntoView({ block: "nearest" });
    return true;
  }

  function click(selector) {
    const found = document.querySelector(selector);
    if (found) found.click();
    return Boolean(found);
  }

  function toggle() {
    const all = rows();
    const box = all[current(all)]?.querySelector("input[type=checkbox]");
    if (box) box.click();
    return Boolean(box);
  }

  function focusSearch() {
    const found = document.querySelector("[data-search]");
    if (!found) return false;
    found.focus();
    found.select();
    return true;
  }

  function showKeys() {
    const dialog = document.getElementById("keys");
    if (!dialog.open) dialog.showModal();
    return true;
  }

  const actions = {
    j: () => move(1),
    k: () => move(-1),
    ArrowDown: () => current(rows()) >= 0 && move(1),
    ArrowUp: () => current(rows()) >= 0 && move(-1),
    x: toggle,
    n: () => click("a[data-next]"),
    p: () => click("a[data-prev]"),
    "/": focusSearch,
    "?": showKeys,
  };

  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    const target = event.target;
    if (target.closest?.("input:not([type=checkbox]), select, textarea, dialog")) {
      if (event.key === "Escape" && target.matches("[data-search]")) target.blur();
      return;
    }
    const action = Object.hasOwn(actions, event.key) ? actions[event.key] : () => click(`[data-key="${CSS.escape(event.key)}"]`);
    if (action()) event.preventDefault();
  });

  addEventListener("DOMContentLoaded", () => document.getElementById("show-keys").addEventListener("click", showKeys));
  addEventListener("click", async ({ target }) => {
    if (!target.matches?.("[data-copy]")) return;
    await navigator.clipboard.writeText(target.parentElement.querySelector("code").textContent);
    target.textContent = "Copied";
  });
})();
