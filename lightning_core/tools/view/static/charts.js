// Draws the charts of a page from <script type="application/json" id="charts">, into [data-charts] and [data-other-charts].
// A chart: {id, title, note, lines: [{name, shape, points: [[step, value] or [step, value, low, high]]}], other}. See charts.py.
// Charts whose lines do not change, such as a loss of 1e-8, are drawn in the closed [data-flat-charts], with their names in its title.
// window.charts.merge(charts) adds points, lines and charts that are new.
(() => {
  const COLORS = 8;
  const CAP = 4;
  // Changes below it are the noise of float32.
  const NOISE = 1e-6;
  const shown = new Map();

  // Canvases need colors as values; custom properties that depend on the theme have none until they are used.
  const probe = document.createElement("span");
  function color(name) {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  }
  let palette = {};
  function readPalette() {
    palette = { line: color("--line"), muted: color("--muted") };
    for (let n = 0; n < COLORS; n++) palette[n] = color(`--chart-${n}`);
  }

  function format(value) {
    if (value === undefined || value === null) return "–";
    if (Number.isInteger(value)) return value.toLocaleString("en");
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/\.?0+e/, "e");
    return size >= 100 ? value.toFixed(1) : String(Number(value.toPrecision(4)));
  }
  const round = (value) => (Math.abs(value) < NOISE ? 0 : value);
  const describe = (point) => (point.length < 4 ? format(point[1]) : `${format(point[1])} [${format(point[2])}, ${format(point[3])}]`);

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  class ChartView {
    constructor(chart) {
      this.chart = chart;
      this.hidden = new Set();
      this.legend = element("ul", { class: "legend" });
      this.plot = element("div", { class: "plot", role: "img" });
      this.table = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Table: ${chart.title}` });
      this.details = element("details", {}, element("summary", {}, "Table"), this.table);
      this.figure = element("figure", { "data-chart": chart.id, class: chart.id === "reward" ? "wide" : "" },
        element("figcaption", {}, element("h3", {}, chart.title), element("span", { class: "muted" }, chart.note)),
        this.legend, this.plot, this.details);
      this.details.addEventListener("toggle", () => this.fillTable());
      this.fillLegend();
    }

    // The first drawing needs the figure's width, which a closed <details> does not have.
    start() {
      new ResizeObserver(() => this.resize()).observe(this.plot);
    }

    resize() {
      const width = this.plot.clientWidth;
      if (!width) return;
      if (this.u) this.u.setSize({ width, height: this.u.height });
      else this.draw();
    }

    data() {
      const steps = [...new Set(this.chart.lines.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
      const index = new Map(steps.map((step, n) => [step, n]));
      const rows = this.chart.lines.map((line) => {
        const row = new Array(steps.length).fill(null);
        for (const point of line.points) row[index.get(point[0])] = point[1];
        return row;
      });
      return [steps, ...rows];
    }

    range() {
      let [low, high] = [Infinity, -Infinity];
      const scale = this.u?.scales.x;
      this.chart.lines.forEach((line, n) => {
        if (this.hidden.has(n)) return;
        for (const point of line.points) {
          if (scale?.min != null && (point[0] < scale.min || point[0] > scale.max)) continue;
          low = Math.min(low, point[2] ?? point[1]);
          high = Math.max(high, point[3] ?? point[1]);
        }
      });
      if (low > high || (low === 0 && high === 0)) return [-0.06, 1];
      const pad = (high - low) * 0.06 || Math.abs(high) * 0.1;
      return [low - pad, high + pad];
    }

    draw() {
      const axis = { stroke: () => palette.muted, grid: { stroke: () => palette.line, width: 1 }, ticks: { stroke: () => palette.line, width: 1 } };
      const series = this.chart.lines.map((line, n) => ({
        stroke: () => palette[n % COLORS],
        width: line.shape === "points" ? 0 : 1.6,
        dash: n >= COLORS ? [6, 4] : undefined,
        spanGaps: true,
        show: !this.hidden.has(n),
        points: {
          show: line.shape === "points" || line.points.length === 1,
          size: line.shape === "points" ? 9 : 6,
          stroke: () => palette[n % COLORS],
          fill: () => palette[n % COLORS],
        },
      }));
      this.u?.destroy();
      this.u = new uPlot({
        width: this.plot.clientWidth,
        height: 190,
        legend: { show: false },
        cursor: { sync: { key: "steps" }, drag: { x: true, y: false }, points: { size: 6 } },
        scales: { x: { time: false }, y: { range: () => this.range() } },
        axes: [
          { ...axis, size: 32, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000] },
          { ...axis, size: 66, values: (_, ticks) => ticks.map(format) },
        ],
        series: [{}, ...series],
        hooks: { drawAxes: [(u) => this.drawIntervals(u)], setCursor: [() => this.fillValues()] },
      }, this.data(), this.plot);
      this.fillValues();
    }

    drawIntervals(u) {
      const { ctx, bbox } = u;
      const x = (step) => u.valToPos(step, "x", true);
      const y = (value) => u.valToPos(value, "y", true);
      ctx.save();
      ctx.beginPath();
      const beside = CAP * devicePixelRatio + ctx.lineWidth; // the whiskers of the first and the last step
      ctx.rect(bbox.left - beside, bbox.top, bbox.width + 2 * beside, bbox.height);
      ctx.clip();
      this.chart.lines.forEach((line, n) => {
        if (this.hidden.has(n)) return;
        const points = line.points.filter((point) => point.length > 2);
        ctx.fillStyle = ctx.strokeStyle = palette[n % COLORS];
        ctx.beginPath();
        if (line.shape === "points") {
          for (const [step, , low, high] of points) {
            ctx.moveTo(x(step), y(low));
            ctx.lineTo(x(step), y(high));
            for (const end of [low, high]) {
              ctx.moveTo(x(step) - CAP * devicePixelRatio, y(end));
              ctx.lineTo(x(step) + CAP * devicePixelRatio, y(end));
            }
          }
          ctx.lineWidth = 2 * devicePixelRatio;
          ctx.stroke();
        } else {
          for (const [step, , , high] of points) ctx.lineTo(x(step), y(high));
          for (const [step, , low] of [...points].reverse()) ctx.lineTo(x(step), y(low));
          ctx.globalAlpha = 0.18;
          ctx.fill();
        }
        ctx.globalAlpha = 1;
      });
      ctx.restore();
    }

    fillLegend() {
      this.values = this.chart.lines.map((line, n) => {
        const value = element("span", { class: "value" });
        const button = element("button", { type: "button", "aria-pressed": String(!this.hidden.has(n)), title: "Show or hide this line" },
          element("span", { class: `swatch swatch-${n % COLORS}` }), line.name);
        button.addEventListener("click", () => this.toggle(n, button));
        return { item: element("li", {}, button, value), value };
      });
      this.legend.replaceChildren(...this.values.map(({ item }) => item));
      this.fillValues();
    }

    toggle(n, button) {
      const hide = !this.hidden.has(n);
      if (hide) this.hidden.add(n);
      else this.hidden.delete(n);
      button.setAttribute("aria-pressed", String(!hide));
      this.u?.setSeries(n + 1, { show: !hide });
    }

    // At the cursor: the newest point of each line up to the cursor's step; else its last one.
    fillValues() {
      const step = this.u?.cursor.idx == null ? Infinity : this.u.data[0][this.u.cursor.idx];
      this.chart.lines.forEach((line, n) => {
        const point = line.points.findLast(([at]) => at <= step);
        this.values[n].value.textContent = point ? `${describe(point)} · step ${point[0]}` : "–";
      });
      const last = this.chart.lines.map((line) => `${line.name}: ${describe(line.points[0])} at step ${line.points[0][0]}, ` +
        `${describe(line.points.at(-1))} at step ${line.points.at(-1)[0]}`);
      this.plot.setAttribute("aria-label", `${this.chart.title} by step. ${last.join(". ")}`);
    }

    fillTable() {
      if (!this.details.open) return;
      const [steps] = this.data();
      const lookup = this.chart.lines.map((line) => new Map(line.points.map((point) => [point[0], point])));
      const cell = (tag, text, attributes) => element(tag, attributes, text);
      const head = element("tr", {}, ...["step", ...this.chart.lines.map((line) => line.name)].map((name) => cell("th", name, { scope: "col", class: "number" })));
      const rows = steps.map((step) => element("tr", {},
        cell("th", format(step), { scope: "row", class: "number" }),
        ...lookup.map((points) => cell("td", points.has(step) ? describe(points.get(step)) : "–", { class: "number" }))));
      this.table.replaceChildren(element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
    }

    merge(chart) {
      let added = false;
      for (const line of chart.lines) {
        const own = this.chart.lines.find((known) => known.name === line.name);
        if (own) {
          const points = new Map([...own.points, ...line.points].map((point) => [point[0], point]));
          own.points = [...points.values()].sort((a, b) => a[0] - b[0]);
        } else {
          this.chart.lines.push(line);
          added = true;
        }
      }
      if (added) this.fillLegend();
      if (this.u && added) this.draw();
      else if (this.u) this.u.setData(this.data(), !this.isZoomed());
      this.fillValues();
      this.fillTable();
    }

    isFlat() {
      if (["reward", "held-out"].includes(this.chart.id)) return false;
      return this.chart.lines.every(({ points }) => {
        const values = points.map((point) => point[1]);
        return values.length > 1 && Math.max(...values) - Math.min(...values) < NOISE;
      });
    }

    place() {
      return this.chart.other ? "[data-other-charts]" : this.isFlat() ? "[data-flat-charts]" : "[data-charts]";
    }

    isZoomed() {
      const [steps, { min, max }] = [this.u.data[0], this.u.scales.x];
      return steps.length > 1 && (min > steps[0] || max < steps.at(-1));
    }
  }

  function merge(charts) {
    for (const chart of charts) {
      const known = shown.get(chart.id);
      const view = known ?? new ChartView(chart);
      if (known) known.merge(chart);
      else shown.set(chart.id, view);
      const place = document.querySelector(view.place());
      if (view.figure.parentElement !== place) place.append(view.figure);
      if (!known) view.start();
    }
    const flat = [...shown.values()].filter((view) => view.place() === "[data-flat-charts]");
    const names = document.querySelector("[data-flat-names]");
    names.textContent = flat.map(({ chart }) => `${chart.title.toLowerCase()} (${format(round(chart.lines[0].points.at(-1)[1]))})`).join(", ");
    for (const selector of ["[data-flat-charts]", "[data-other-charts]"]) {
      const place = document.querySelector(selector);
      place?.closest("details").toggleAttribute("hidden", !place.childElementCount);
    }
    document.querySelector("[data-no-charts]")?.toggleAttribute("hidden", shown.size > 0);
  }

  function recolor() {
    readPalette();
    for (const { u } of shown.values()) u?.redraw(false);
  }

  document.body.append(probe);
  probe.hidden = true;
  readPalette();
  addEventListener("themechange", recolor);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolor);
  window.charts = { merge };
  merge(JSON.parse(document.getElementById("charts").textContent));
})();
