// Follows a stream of events: follow(url, {event name: handler of its data}). The event "end" closes it.
// A hidden tab holds no connection: browsers allow six to one host, for all tabs together.
window.follow = (url, handlers) => {
  let source = null;
  let ended = false;

  function open() {
    if (source || ended || document.hidden) return;
    source = new EventSource(url());
    for (const [name, handler] of Object.entries(handlers)) source.addEventListener(name, (event) => handler(event.data));
    source.addEventListener("end", () => {
      ended = true;
      close();
    });
  }

  function close() {
    source?.close();
    source = null;
  }

  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  addEventListener("pagehide", close);
  addEventListener("pageshow", open);
  open();
};
