// The page of a run: follows the run, and searches its configuration.
(() => {
  const page = document.querySelector("[data-events]");
  if (page) {
    let last = Number(page.dataset.after);
    window.follow(() => `${page.dataset.events}?after=${last}`, {
      charts: (data) => {
        const charts = JSON.parse(data);
        window.charts.merge(charts);
        // The first chart has every step; held-out points may be of earlier ones.
        for (const chart of charts) for (const line of chart.lines) last = Math.max(last, line.points.at(-1)[0]);
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
