// Streams, events and failures of the emulated device.
//
// A stream is a thread with a queue. Before each piece of work it pauses for as long as the seed says: some streams of a seed
// are slow and others fast, so that a wait which is missing shows under one seed or another.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace emulated {

constexpr int kDevices = 2;
constexpr int kPool = 32;  // streams of one device beside the default one; then they are handed out again
constexpr auto kType = c10::DeviceType::PrivateUse1;

struct Settings {
  std::atomic<uint64_t> seed{0};
  std::atomic<int> pause_us{0};          // the longest pause before a piece of work
  std::atomic<int> context_ms{0};        // what the first use of a device costs
  std::atomic<size_t> memory_limit{size_t{1} << 30}, pin_limit{size_t{1} << 40};
  std::atomic<long> refuse_memory_in{-1};  // so many allocations later one is refused; -1: none
  std::atomic<bool> refuse_streams{false}, pageable_is_direct{false};
  std::atomic<long> fail_in{-1};           // so many pieces of work later the device fails; -1: it does not
  std::atomic<int> fail_code{719};
  std::atomic<long> queued{0}, waited{0};
};
inline Settings settings;

struct NoGil {  // around every wait of the host: what runs on a stream may need the lock
  PyThreadState* state = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~NoGil() {
    if (state) PyEval_RestoreThread(state);
  }
};

// ---- failures stick, as those of a context do ----

struct Failure {
  std::mutex m;
  int code = 0;
  std::string why;
};
inline Failure failure;

inline void fail(int code, const std::string& why) {
  std::lock_guard<std::mutex> l(failure.m);
  if (!failure.code) failure.code = code, failure.why = why;
}
inline bool has_failed() {
  std::lock_guard<std::mutex> l(failure.m);
  return failure.code != 0;
}
inline void raise_failure() {
  std::lock_guard<std::mutex> l(failure.m);
  if (failure.code)
    throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, failure.code, "emu error: " + failure.why);
}

// ---- contexts: which devices this process has used ----

inline std::atomic<bool> has_context[kDevices];
inline std::mutex context_lock;
inline void make_context(int device) {
  if (has_context[device]) return;
  NoGil no_gil;
  std::lock_guard<std::mutex> l(context_lock);
  if (has_context[device]) return;
  std::this_thread::sleep_for(std::chrono::milliseconds(settings.context_ms.load()));
  has_context[device] = true;
}

// ---- streams and events ----

struct Moment {  // one recording of an event
  std::mutex m;
  std::condition_variable reached;
  bool is_past = false;
  void pass() {
    std::lock_guard<std::mutex> l(m);
    is_past = true;
    reached.notify_all();
  }
  bool query() {
    std::lock_guard<std::mutex> l(m);
    return is_past;
  }
  void wait() {
    std::unique_lock<std::mutex> l(m);
    reached.wait(l, [this] { return is_past; });
  }
};
using MomentPtr = std::shared_ptr<Moment>;

inline uint64_t mixed(uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

class Stream {
 public:
  const int device;
  const int64_t id;
  Stream(int device, int64_t id) : device(device), id(id) { std::thread([this] { run(); }).detach(); }

  void put(std::function<void()> work) { push({true, std::move(work)}); }
  // A step of the stream's own, such as a wait: it does not pause, and it runs on a device that failed too.
  void order(std::function<void()> step) { push({false, std::move(step)}); }
  MomentPtr record() {
    auto moment = std::make_shared<Moment>();
    order([moment] { moment->pass(); });
    return moment;
  }
  void wait_for(const MomentPtr& moment) {
    order([moment] { moment->wait(); });
  }
  bool is_idle() {
    std::lock_guard<std::mutex> l(m_);
    return !left_;
  }
  void drain() {
    {
      NoGil no_gil;
      std::unique_lock<std::mutex> l(m_);
      idle_.wait(l, [this] { return !left_; });
    }
    raise_failure();
  }

 private:
  struct Entry {
    bool is_work;
    std::function<void()> call;
  };
  std::mutex m_;
  std::condition_variable more_, idle_;
  std::deque<Entry> entries_;
  size_t left_ = 0;
  uint64_t drawn_ = 0;

  void push(Entry entry) {
    make_context(device);
    std::lock_guard<std::mutex> l(m_);
    entries_.push_back(std::move(entry));
    left_++;
    more_.notify_one();
  }
  void pause() {
    const uint64_t longest = settings.pause_us;
    if (!longest) return;
    const uint64_t seed = mixed(settings.seed * 0x51ull);
    // of a seed some streams are slow: the default ones by one bit of it, the others by another
    const bool is_slow = (seed >> (id ? 1 : 0)) & 1;
    const uint64_t at_most = is_slow ? longest : longest / 50;
    const uint64_t us = mixed(seed ^ (uint64_t(device) << 40) ^ (uint64_t(id) << 32) ^ drawn_++) % (at_most + 1);
    if (us > 20) std::this_thread::sleep_for(std::chrono::microseconds(us));
  }
  void run() {
    at::AutoDispatchBelowADInplaceOrView below;
    at::NoGradGuard no_grad;
    for (;;) {
      Entry entry;
      {
        std::unique_lock<std::mutex> l(m_);
        more_.wait(l, [this] { return !entries_.empty(); });
        entry = std::move(entries_.front());
        entries_.pop_front();
      }
      try {
        if (entry.is_work) {
          pause();
          if (settings.fail_in >= 0 && settings.fail_in-- == 0)
            fail(settings.fail_code, settings.fail_code == 2 ? "out of memory" : "unspecified launch failure");
        }
        if (!entry.is_work || !has_failed()) entry.call();
      } catch (const c10::Error& error) {
        fail(710, error.what_without_backtrace());
      } catch (const std::exception& error) {
        fail(710, error.what());
      }
      entry.call = nullptr;  // before others see this stream idle
      std::lock_guard<std::mutex> l(m_);
      if (!--left_) idle_.notify_all();
    }
  }
};

class Streams {
 public:
  Stream* get(int device, int64_t id) {
    std::lock_guard<std::mutex> l(m_);
    auto& own = made_[device];
    while (static_cast<int64_t>(own.size()) <= id) own.push_back(new Stream(device, own.size()));
    return own[id];
  }
  Stream* next(int device) {
    TORCH_CHECK(!settings.refuse_streams, "emu error: no stream could be made");
    make_context(device);
    int64_t id;
    {
      std::lock_guard<std::mutex> l(m_);
      id = 1 + given_[device]++ % kPool;
    }
    return get(device, id);
  }
  std::vector<Stream*> all(int device) {
    std::lock_guard<std::mutex> l(m_);
    return made_[device];
  }

 private:
  std::mutex m_;
  std::vector<Stream*> made_[kDevices];
  int64_t given_[kDevices] = {};
};
inline Streams& streams() {
  static auto* it = new Streams;  // never destroyed: its threads run until the process ends
  return *it;
}

// ---- what is current in this thread ----

inline thread_local int here = 0;
inline thread_local int64_t stream_here[kDevices] = {};

inline int index_of(c10::Device device) { return device.has_index() ? device.index() : here; }
inline Stream* current(int device) { return streams().get(device, stream_here[device]); }
inline Stream* stream_of(const c10::Stream& s) { return streams().get(s.device_index(), s.id()); }
inline c10::Stream as_torch(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
}
inline void go_to(int device, bool is_used) {
  TORCH_CHECK(device >= 0 && device < kDevices, "emu error: invalid device ordinal ", device);
  here = device;
  if (is_used) make_context(device);
}

}  // namespace emulated
