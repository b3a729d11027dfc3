// The page of a run: follows the run, and searches its configuration.
(() => {
  const page = document.querySelector("[data-events]");
  if (page) {
    let { after, mark } = page.dataset;
    window.follow(() => `${page.dataset.events}?after=${after}&mark=${mark}`, {
      charts: (data) => {
        const found = JSON.parse(data);
        window.charts.merge(found.charts);
        ({ after, mark } = found);
      },
      status: (data) => (document.getElementById("status").innerHTML = data),
      restart: () => location.reload(),
    });
  }

  const search = document.getElementById("settings-search");
  search?.addEventListener("input", () => {
    const words = search.value.toLowerCase().split(/\s+/);
    let found = 0;
    for (const row of document.querySelectorAll("#settings tr")) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      found += !row.hidden;
    }
    document.getElementById("settings-found").textContent = search.value ? `${found} found` : "";
  });
})();
