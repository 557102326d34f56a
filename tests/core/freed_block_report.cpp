// A profiler that allocates a tensor while it hears that another one is freed.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>

namespace {

constexpr size_t kBytes = size_t{5} << 20;

class Profiler final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* block, int64_t bytes, size_t, size_t, c10::Device) override {
    if (bytes >= 0 || freed_ != nullptr) return;
    freed_ = block;
    next_ = c10::GetCPUAllocator()->allocate(kBytes);
  }

  bool memoryProfilingEnabled() const override { return true; }

  bool heard_of_a_free_block() const { return freed_ == next_.get(); }

 private:
  void* freed_ = nullptr;
  c10::DataPtr next_;
};

}  // namespace

// Returns 1 if the report of a freed block came when the block could have a new owner already, 0 if it came before.
extern "C" int reported_late() {
  const auto profiler = std::make_shared<Profiler>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, profiler);
  c10::GetCPUAllocator()->allocate(kBytes).clear();
  return profiler->heard_of_a_free_block();
}
