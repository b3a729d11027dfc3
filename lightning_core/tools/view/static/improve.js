// The page of `lightning-rl improve`: follows it while it runs.
(() => {
  const part = document.getElementById("improve");
  if (part.dataset.events) window.follow(() => part.dataset.events, { improve: (html) => (part.innerHTML = html) });
})();
