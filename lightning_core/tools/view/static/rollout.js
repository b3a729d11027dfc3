// Sampled tokens (loaded when they come into view, colored, read by pointer or keys), folded messages, and the tree's current row.
(() => {
  const COLORS = ["text", "logprob", "advantage", "change"];
  const root = document.documentElement;
  const stored = sessionStorage.getItem("lightning-color");
  root.dataset.color = COLORS.includes(stored) ? stored : "logprob";

  async function fragment(url) {
    const response = await fetch(url);
    if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
    return response.text();
  }

  // The server has escaped every text of these fragments.
  async function fill(element, url) {
    try {
      element.innerHTML = await fragment(url);
    } catch (error) {
      element.textContent = `This part could not be loaded (${error.message}). Reload the page to try again.`;
    }
  }

  const seen = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting || root.dataset.color === "text") continue;
      seen.unobserve(target);
      fill(target.querySelector(".sampled"), target.dataset.tokens).then(() => target.classList.add("loaded"));
    }
  }, { rootMargin: "400px" });

  function watch() {
    for (const element of document.querySelectorAll("[data-tokens]:not(.loaded)")) {
      seen.unobserve(element);
      seen.observe(element);
    }
  }

  function setColor(color) {
    root.dataset.color = color;
    sessionStorage.setItem("lightning-color", color);
    for (const input of document.querySelectorAll("input[name=color]")) input.checked = input.value === color;
    watch();
  }

  // One token at a time, under the pointer or chosen by the arrow keys.
  let tip, current;
  function hide() {
    current?.classList.remove("on");
    current = undefined;
    tip.hidden = true;
  }

  function line(list, name, value) {
    if (value === undefined) return;
    const dt = document.createElement("dt"), dd = document.createElement("dd");
    dt.textContent = name;
    dd.textContent = value;
    list.append(dt, dd);
  }

  function show(token) {
    if (token === current) return;
    current?.classList.remove("on");
    current = token;
    token.classList.add("on");
    const strip = token.parentElement, list = document.createElement("dl"), text = document.createElement("div");
    const { id, logprob, change, bytes } = token.dataset;
    text.className = "text";
    if (!strip.classList.contains("ids")) text.textContent = token.textContent ? JSON.stringify(token.textContent) : "part of a character";
    line(list, "token", `${[...strip.children].indexOf(token) + 1} of ${strip.children.length}`);
    line(list, "id", id);
    line(list, "bytes", bytes);
    line(list, "logprob", logprob);
    line(list, "probability", logprob === undefined ? undefined : Math.exp(Number(logprob)).toPrecision(3));
    line(list, "advantage", strip.dataset.advantage);
    line(list, "change", change);
    tip.replaceChildren(text, list);
    tip.hidden = false;
    const box = token.getClientRects()[0] ?? token.getBoundingClientRect(), own = tip.getBoundingClientRect();
    const below = box.bottom + 6 + own.height < innerHeight;
    tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - own.width - 4))}px`;
    tip.style.top = `${Math.max(4, below ? box.bottom + 6 : box.top - own.height - 6)}px`;
  }

  function step(strip, key) {
    const tokens = [...strip.children], now = current?.parentElement === strip ? tokens.indexOf(current) : -1;
    const next = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: tokens.length - 1 }[key];
    if (next === undefined) return false;
    const token = tokens[Math.max(0, Math.min(tokens.length - 1, next))];
    token.scrollIntoView({ block: "nearest" });
    show(token);
    return true;
  }

  function markRow() {
    document.querySelector(".row.now")?.classList.remove("now");
    if (!location.hash) return;
    const link = [...document.querySelectorAll(".outline a")].find((a) => a.hash === location.hash);
    link?.parentElement.classList.add("now");
  }

  addEventListener("DOMContentLoaded", () => {
    tip = document.getElementById("token");
    setColor(root.dataset.color);
    markRow();
    addEventListener("hashchange", markRow);
    document.querySelector(".next-color")?.addEventListener("click", () =>
      setColor(COLORS[(COLORS.indexOf(root.dataset.color) + 1) % COLORS.length]));
    document.addEventListener("change", (event) => {
      if (event.target.name === "color") setColor(event.target.value);
    });
    document.addEventListener("toggle", (event) => {
      const { fragment: url } = event.target.dataset ?? {};
      if (!url || !event.target.open) return;
      delete event.target.dataset.fragment;
      const part = document.createElement("div");
      event.target.querySelector("p")?.remove();
      event.target.append(part);
      fill(part, url);
    }, true);
    if (!tip) return;
    document.addEventListener("pointerover", (event) => {
      const token = event.target.closest?.(".strip > .t");
      if (token) show(token);
      else if (current && !document.activeElement.matches(".strip")) hide();
    });
    document.addEventListener("keydown", (event) => {
      const strip = event.target.closest?.(".strip");
      if (!strip || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "Escape") hide();
      else if (step(strip, event.key)) event.preventDefault();
    });
    document.addEventListener("focusout", (event) => event.target.closest?.(".strip") && hide());
    addEventListener("scroll", (event) => current && !document.activeElement.matches(".strip") && hide(), { passive: true });
  });
})();
