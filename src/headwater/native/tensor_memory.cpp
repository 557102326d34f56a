// Memory of large CPU tensors.
//
// A training step allocates and frees the same large tensors again and again. New memory from the system costs
// page faults and clearing, which take longer than most arithmetic on it. malloc can keep what is freed, but an
// aligned block of glibc's malloc needs about 100 bytes more than the block, and small blocks use the rest of it
// later, so an equal block does not fit into the hole. The holes then hold a quarter of the memory and more.
//
// Here large blocks come from separate ranges, beside malloc. A freed block joins its free neighbours, and a
// new block takes the smallest free range into which it fits. Blocks and free ranges together have at most a
// twentieth more bytes than the blocks had at their peak. If a new block would exceed this limit, free ranges go
// back to the system, the smallest first, because few blocks fit into them. So the peak of the process is about
// the peak of its tensors, and a step that repeats needs no new pages.
//
// One lock protects all of this. Smaller blocks come from torch's own allocator.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

namespace {

constexpr size_t kSmallest = size_t{1} << 20;  // bytes of the smallest block that is allocated here
constexpr size_t kLargest = size_t{1} << 56;   // no system has so much memory, and sums of sizes do not overflow
constexpr size_t kUnit = size_t{64} << 10;     // sizes are rounded up to multiples of these bytes
constexpr size_t kPage = 4096;
constexpr size_t kShare = 20;  // free ranges may exceed the highest sum of blocks by a twentieth of it

size_t rounded(size_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }

class Ranges {
 public:
  // Returns a block of at least `bytes`, or null if the system has no memory.
  char* take(size_t bytes) {
    const std::lock_guard<std::mutex> guard(lock_);
    const size_t size = rounded(bytes);
    char* block = reuse(size);
    if (block == nullptr) block = map(size);
    if (block != nullptr) {
      blocks_[block] = size;
      used_ += size;
      highest_ = std::max(highest_, used_);
    }
    return block;
  }

  bool has(char* block) {
    const std::lock_guard<std::mutex> guard(lock_);
    return blocks_.count(block) > 0;
  }

  // Frees a block that `take` has returned.
  void give(char* block) {
    const std::lock_guard<std::mutex> guard(lock_);
    const auto found = blocks_.find(block);
    const size_t size = found->second;
    blocks_.erase(found);
    used_ -= size;
    add_free(block, size);
  }

  // Returns all free ranges to the system, and lowers the peak to the bytes of the present blocks.
  void return_free() {
    const std::lock_guard<std::mutex> guard(lock_);
    shrink(free_);
    highest_ = used_;
  }

  void count(size_t* used, size_t* free, size_t* mapped) {
    const std::lock_guard<std::mutex> guard(lock_);
    *used = used_;
    *free = free_;
    *mapped = mapped_;
  }

  std::mutex& lock() { return lock_; }

 private:
  using ByAddress = std::map<char*, size_t>;

  char* reuse(size_t size) {
    const auto found = by_size_.lower_bound({size, nullptr});
    if (found == by_size_.end()) return nullptr;
    const auto [whole, range] = *found;
    remove_free(by_address_.find(range));
    if (whole > size) add_free(range + size, whole - size);
    return range;
  }

  char* map(size_t size) {
    const size_t highest = std::max(highest_, used_ + size);
    const size_t most = highest + highest / kShare, wanted = used_ + free_ + size;
    if (wanted > most) shrink(wanted - most);
    void* range = new_range(size);
    if (range == MAP_FAILED && free_ > 0) {
      shrink(free_);
      range = new_range(size);
    }
    if (range == MAP_FAILED) return nullptr;
    madvise(range, size, MADV_HUGEPAGE);  // a kernel without huge pages refuses, and all works as well
    mapped_ += size;
    return static_cast<char*>(range);
  }

  static void* new_range(size_t size) {
    return mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }

  // Returns at least `bytes` of free ranges to the system.
  void shrink(size_t bytes) {
    bytes = rounded(bytes);
    while (bytes > 0 && !by_size_.empty()) {
      const auto [size, range] = *by_size_.begin();
      const size_t part = std::min(bytes, size);
      remove_free(by_address_.find(range));
      if (part < size) add_free(range + part, size - part);
      if (munmap(range, part) != 0) {
        add_free(range, part);
        return_pages();
        return;
      }
      bytes -= part;
    }
  }

  // Returns the pages of all free ranges to the system, and keeps the addresses for new blocks. The system
  // refuses to unmap a range if that would make too many mappings.
  void return_pages() {
    for (const auto& [range, size] : by_address_) madvise(range, size, MADV_DONTNEED);
  }

  void add_free(char* range, size_t size) {
    auto next = by_address_.lower_bound(range);
    if (next != by_address_.end() && next->first == range + size) {
      size += next->second;
      next = remove_free(next);
    }
    if (next != by_address_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == range) {
        range = before->first;
        size += before->second;
        remove_free(before);
      }
    }
    by_address_[range] = size;
    by_size_.insert({size, range});
    free_ += size;
  }

  ByAddress::iterator remove_free(ByAddress::iterator range) {
    by_size_.erase({range->second, range->first});
    free_ -= range->second;
    return by_address_.erase(range);
  }

  std::mutex lock_;
  std::unordered_map<char*, size_t> blocks_;
  ByAddress by_address_;                         // free ranges
  std::set<std::pair<size_t, char*>> by_size_;  // free ranges, the smallest first
  size_t used_ = 0;                              // bytes of blocks
  size_t free_ = 0;                              // bytes of free ranges
  size_t highest_ = 0;                           // the most bytes of blocks at once
  size_t mapped_ = 0;                            // bytes of all mappings so far; never decreases
};

// Never destroyed: tensors may outlive all destructors of a library.
Ranges& ranges() {
  static auto* const all = new Ranges;
  return *all;
}

// The allocator of torch before this one is installed. The first call is that of `install`.
c10::Allocator& torchs_own() {
  static c10::Allocator* const own = c10::GetCPUAllocator();
  return *own;
}

void give(void* pointer) {
  char* const block = static_cast<char*>(pointer);
  // malloc's blocks of this size are hardly ever at the beginning of a page, so they rarely need the lock.
  const bool may_be_here = block != nullptr && reinterpret_cast<uintptr_t>(block) % kPage == 0;
  if (!may_be_here || !ranges().has(block)) {
    torchs_own().raw_deallocate(block);
    return;
  }
  // The report comes first. Once the block is free, another thread may take it and report it as new.
  c10::profiledCPUMemoryReporter().Delete(block);
  ranges().give(block);
}

class TensorMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const bool here = bytes >= kSmallest && bytes <= kLargest;
    void* block = here ? ranges().take(bytes) : nullptr;
    if (block != nullptr) {
      c10::profiledCPUMemoryReporter().New(block, bytes);
    } else if (bytes > 0) {
      block = torchs_own().raw_allocate(bytes);  // raises torch's error if there is no memory
    }
    return {block, block, &give, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give; }

  void copy_data(void* to, const void* from, size_t bytes) const final { default_copy_data(to, from, bytes); }
};

// A fork must not copy the ranges while another thread changes them.
void lock_ranges() { ranges().lock().lock(); }
void unlock_ranges() { ranges().lock().unlock(); }

bool install() {
  torchs_own();  // first: afterwards torch's allocator is the new one
  if (pthread_atfork(lock_ranges, unlock_ranges, unlock_ranges) != 0) return false;
  auto* const memory = new TensorMemory;
  c10::SetCPUAllocator(memory);
  return c10::GetCPUAllocator() == memory;
}

}  // namespace

extern "C" {

// Makes torch allocate CPU tensors here, once. Returns 0 if the system refuses to register the handlers of forks,
// or if torch keeps another allocator.
int headwater_tensor_memory() {
  static const bool installed = install();  // threads that call at the same time wait for the first one
  return installed;
}

void headwater_return_free() { ranges().return_free(); }

void headwater_count(size_t* used, size_t* free, size_t* mapped) { ranges().count(used, free, mapped); }
}
