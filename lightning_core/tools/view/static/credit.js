// Shows the parameters of the chosen rule; those of the others are not sent.
(() => {
  function choose(select) {
    for (const rule of select.parentElement.querySelectorAll("[data-rule]")) {
      rule.hidden = rule.disabled = rule.dataset.rule !== select.value;
    }
  }
  addEventListener("DOMContentLoaded", () => {
    for (const select of document.querySelectorAll("[data-rules]")) {
      select.addEventListener("change", () => choose(select));
      choose(select); // the browser may have restored an earlier choice
    }
  });
})();
