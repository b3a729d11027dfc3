// Fills each element with data-load="URL" with the fragment at that URL, after the page: for parts that take long to compute.
(() => {
  async function fill(element) {
    try {
      const response = await fetch(element.dataset.load);
      if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
      element.innerHTML = await response.text();
    } catch (error) {
      element.textContent = `This part could not be loaded (${error.message}). Reload the page to try again.`;
    }
    element.removeAttribute("aria-busy");
  }
  addEventListener("DOMContentLoaded", () => document.querySelectorAll("[data-load]").forEach(fill));
})();
