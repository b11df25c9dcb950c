// Memory of the emulated device, host memory that it may use directly, and its generator.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/GeneratorImpl.h>
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <set>

#include "streams.h"

namespace emulated {

// An address of the device lies in a range without access rights: the host that reads it dies. What a stream's thread reads
// and writes lies elsewhere, at the same distance. A freed block belongs to its stream, is filled with kPoison there, and is
// handed out again at once, the last one first: legal for that stream's later work, and wrong for any other stream's.
class DeviceMemory final : public c10::Allocator {
 public:
  DeviceMemory() {
    for (int d = 0; d < kDevices; d++) {
      shown_[d] = map(PROT_NONE);
      real_[d] = map(PROT_READ | PROT_WRITE);
    }
  }
  int device_of(const void* address) const {
    const auto* at = static_cast<const char*>(address);
    for (int d = 0; d < kDevices; d++)
      if (at >= shown_[d] && at < shown_[d] + kRange) return d;
    return -1;
  }
  char* real(const void* address) const {  // what a stream's thread uses for it
    const int d = device_of(address);
    auto* at = static_cast<char*>(const_cast<void*>(address));
    return d < 0 ? at : real_[d] + (at - shown_[d]);
  }
  c10::DataPtr allocate(size_t nbytes) override {
    void* at = nbytes ? take(here, nbytes) : nullptr;
    return {at, at, &release, c10::Device(kType, here)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override {
    char *a = real(to), *b = real(from);
    current(std::max(device_of(to), 0))->put([=] { memcpy(a, b, n); });
  }
  void used_by(const void* address, Stream* stream) {  // record_stream
    std::lock_guard<std::mutex> l(m_);
    auto found = live_.find(static_cast<const char*>(address));
    if (found != live_.end() && found->second->owner != stream) found->second->others.insert(stream);
  }
  size_t live_bytes(int device) {
    std::lock_guard<std::mutex> l(m_);
    size_t sum = 0;
    for (auto& [_, block] : live_) sum += block->device == device ? block->size : 0;
    return sum;
  }

 private:
  static constexpr size_t kRange = size_t{8} << 30, kGrain = 512;
  static constexpr int kFresh = 0xFF, kPoison = 0xFB;
  struct Block {
    char* at;
    size_t size;
    int device;
    Stream* owner;
    std::set<Stream*> others;
  };
  std::mutex m_;
  char *shown_[kDevices], *real_[kDevices];
  size_t made_[kDevices] = {};
  std::map<const char*, Block*> live_;
  std::vector<Block*> free_;
  std::vector<std::pair<Block*, std::vector<MomentPtr>>> kept_;  // until other streams have passed these moments

  static char* map(int rights) {
    void* at = mmap(nullptr, kRange, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "emu error: no addresses");
    return static_cast<char*>(at);
  }
  static void release(void* at);

  void free_block(Block* block) {  // m_ is held
    char* at = real(block->at);
    const size_t n = block->size;
    block->owner->order([at, n] { memset(at, kPoison, n); });
    free_.push_back(block);
  }
  void collect() {  // m_ is held
    auto is_over = [this](auto& kept) {
      for (auto& moment : kept.second)
        if (!moment->query()) return false;
      free_block(kept.first);
      return true;
    };
    kept_.erase(std::remove_if(kept_.begin(), kept_.end(), is_over), kept_.end());
  }
  Block* again(int device, Stream* owner, size_t size) {  // m_ is held; owner null: whosever it was
    for (auto it = free_.rbegin(); it != free_.rend(); ++it)
      if ((*it)->device == device && (!owner || (*it)->owner == owner) && (*it)->size >= size && (*it)->size <= 4 * size) {
        Block* block = *it;
        free_.erase(std::next(it).base());
        return block;
      }
    return nullptr;
  }
  Block* found(int device, Stream* stream, size_t size) {
    std::lock_guard<std::mutex> l(m_);
    collect();
    Block* block = again(device, stream, size);
    if (!block && made_[device] + size <= std::min(settings.memory_limit.load(), kRange)) {
      block = new Block{shown_[device] + made_[device], size, device, stream, {}};
      made_[device] += size;
      memset(real(block->at), kFresh, size);
    }
    return block;
  }
  void* take(int device, size_t nbytes) {
    raise_failure();
    make_context(device);
    const size_t size = (nbytes + kGrain - 1) / kGrain * kGrain;
    Stream* stream = current(device);
    const bool is_refused = settings.refuse_memory_in >= 0 && settings.refuse_memory_in-- == 0;
    Block* block = is_refused ? nullptr : found(device, stream, size);
    if (!block && !is_refused) {  // all that is free anywhere, once nothing runs any more
      for (Stream* each : streams().all(device)) each->drain();
      std::lock_guard<std::mutex> l(m_);
      collect();
      block = again(device, nullptr, size);
    }
    TORCH_CHECK_WITH(OutOfMemoryError, block, "emu out of memory. Tried to allocate ", nbytes, " bytes on device ", device);
    std::lock_guard<std::mutex> l(m_);
    block->owner = stream;
    live_[block->at] = block;
    return block->at;
  }
  void give_back(void* at) {
    std::lock_guard<std::mutex> l(m_);
    auto found = live_.find(static_cast<char*>(at));
    if (found == live_.end()) return;
    Block* block = found->second;
    live_.erase(found);
    std::vector<MomentPtr> moments;
    for (Stream* stream : block->others) moments.push_back(stream->record());
    block->others.clear();
    if (moments.empty())
      free_block(block);
    else
      kept_.emplace_back(block, std::move(moments));
  }
};
inline DeviceMemory& device_memory() {
  static auto* it = new DeviceMemory;
  return *it;
}
inline void DeviceMemory::release(void* at) {
  if (at) device_memory().give_back(at);
}

// Page-locked memory of the host: what torch allocates so, and ranges that were registered.
class Pinned final : public c10::Allocator {
 public:
  bool holds(const void* address, size_t n) {
    std::lock_guard<std::mutex> l(m_);
    auto found = find(reinterpret_cast<uintptr_t>(address));
    return found != ranges_.end() && reinterpret_cast<uintptr_t>(address) + n <= found->first + found->second.size;
  }
  void used(const void* address, MomentPtr until) {  // torch hands its own out again only behind that
    std::lock_guard<std::mutex> l(m_);
    auto found = find(reinterpret_cast<uintptr_t>(address));
    if (found != ranges_.end() && found->second.is_torchs) found->second.uses.push_back(std::move(until));
  }
  int add(uintptr_t at, size_t n) {  // CUDA's numbers: 1 invalid value, 2 out of memory, 712 already registered
    make_context(here);
    std::lock_guard<std::mutex> l(m_);
    if (!at || !n) return 1;
    auto next = ranges_.lower_bound(at);
    if ((next != ranges_.end() && next->first < at + n) || find(at) != ranges_.end()) return 712;
    if (bytes_ + n > settings.pin_limit) return 2;
    ranges_[at] = {n, false, {}};
    grown(n);
    return 0;
  }
  int remove(uintptr_t at) {  // 713: not registered
    make_context(here);
    std::lock_guard<std::mutex> l(m_);
    auto found = ranges_.find(at);
    if (found == ranges_.end() || found->second.is_torchs) return 713;
    bytes_ -= found->second.size;
    ranges_.erase(found);
    return 0;
  }
  c10::DataPtr allocate(size_t n) override {
    if (!n) return {nullptr, nullptr, &release, c10::Device(c10::kCPU)};
    raise_failure();
    make_context(here);
    std::lock_guard<std::mutex> l(m_);
    TORCH_CHECK(bytes_ + n <= settings.pin_limit, "emu error: out of memory that can be page-locked");
    void* at = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "emu error: no host memory");
    ranges_[reinterpret_cast<uintptr_t>(at)] = {n, true, {}};
    grown(n);
    return {at, at, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
  size_t bytes() {
    std::lock_guard<std::mutex> l(m_);
    return bytes_;
  }
  size_t most() {
    std::lock_guard<std::mutex> l(m_);
    return most_;
  }

 private:
  struct Range {
    size_t size;
    bool is_torchs;
    std::vector<MomentPtr> uses;
  };
  std::mutex m_;
  std::map<uintptr_t, Range> ranges_;
  size_t bytes_ = 0, most_ = 0;

  void grown(size_t n) {
    bytes_ += n;
    most_ = std::max(most_, bytes_);
  }
  std::map<uintptr_t, Range>::iterator find(uintptr_t at) {
    auto next = ranges_.upper_bound(at);
    if (next == ranges_.begin()) return ranges_.end();
    --next;
    return at < next->first + next->second.size ? next : ranges_.end();
  }
  static void release(void* at);
  void give_back(void* at) {
    std::vector<MomentPtr> uses;
    {
      std::lock_guard<std::mutex> l(m_);
      uses = std::move(ranges_[reinterpret_cast<uintptr_t>(at)].uses);
    }
    {
      NoGil no_gil;
      for (auto& until : uses) until->wait();
    }
    std::lock_guard<std::mutex> l(m_);
    auto found = ranges_.find(reinterpret_cast<uintptr_t>(at));
    bytes_ -= found->second.size;
    munmap(at, found->second.size);
    ranges_.erase(found);
  }
};
inline Pinned& pinned() {
  static auto* it = new Pinned;
  return *it;
}
inline void Pinned::release(void* at) {
  if (at) pinned().give_back(at);
}

// A seed and a counter: each operation that draws takes one number, from which the host's generator draws the rest.
struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, drawn_ = 0;
  explicit Generator(int device)
      : GeneratorImpl(c10::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  uint64_t draw() { return mixed(seed_ ^ mixed(++drawn_)); }
  void set_current_seed(uint64_t seed) override { seed_ = seed, drawn_ = 0; }
  uint64_t current_seed() const override { return seed_; }
  void set_offset(uint64_t offset) override { drawn_ = offset; }
  uint64_t get_offset() const override { return drawn_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "emu error: the state of a generator has 16 bytes");
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], drawn_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::kByte);
    auto* words = static_cast<uint64_t*>(state.mutable_data_ptr());
    words[0] = seed_, words[1] = drawn_;
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* made = new Generator(device().index());
    made->seed_ = seed_, made->drawn_ = drawn_;
    return made;
  }
};
inline const at::Generator& default_generator(int device) {
  static auto* all = new std::vector<at::Generator>{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return all->at(device < 0 ? here : device);
}

}  // namespace emulated
