// The list of runs: follows running ones, and counts the selected ones.
(() => {
  const body = document.querySelector("[data-rows]");
  const button = document.getElementById("compare");

  function count() {
    const selected = document.querySelectorAll("input[name=run]:checked").length;
    button.disabled = selected < 2;
    button.textContent = selected < 2 ? "Compare: select at least 2 runs" : `Compare ${selected} runs`;
  }

  function replace(row, html) {
    const template = document.createElement("template");
    template.innerHTML = html;
    const next = template.content.querySelector("tr");
    if (row.outerHTML === next.outerHTML) return;
    const [checked, focused] = [row.querySelector("input").checked, row.contains(document.activeElement) && document.activeElement.tagName];
    row.replaceWith(next);
    next.querySelector("input").checked = checked;
    if (focused) next.querySelector(focused)?.focus();
  }

  if (!body) return;
  body.addEventListener("change", count);
  addEventListener("pageshow", count); // after "back", the browser has selected them again
  count();
  window.follow(() => "/events", {
    row: (data) => {
      const { name, html } = JSON.parse(data);
      const row = [...body.children].find((known) => known.dataset.run === name);
      if (row) replace(row, html);
      else if (!location.search) {
        body.insertAdjacentHTML("afterbegin", html);
        count();
      }
    },
  });
})();
